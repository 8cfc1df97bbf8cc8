"""vLLM's requests, as far as they are used here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def request(
    request_id: str = "r",
    cache_salt: str | None = None,
    lora: Any = None,
    prompt_embeds: Any = None,
    computed: bool = False,
    **more: Any,
) -> Any:
    fields = {"mm_features": [], "kv_transfer_params": None, **more}
    return SimpleNamespace(
        request_id=request_id,
        cache_salt=cache_salt,
        lora_request=lora,
        prompt_embeds=prompt_embeds,
        skip_reading_prefix_cache=computed,
        **fields,
    )
