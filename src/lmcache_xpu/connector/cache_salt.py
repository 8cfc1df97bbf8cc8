"""What sets a request's KV apart beside its tokens.

The `cache_salt` with which a client keeps its entries from others, the LoRA adapter, and embeddings
given in place of tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lmcache_xpu.model.adapter_names import adapter_name

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["salt_of"]


def salt_of(request: Request) -> str | None:
    """Return what sets this request's KV apart beside its tokens; empty if nothing does.

    Returns:
        None where nobody can say it: nothing of the request may be looked up or stored.
    """
    if request.prompt_embeds is not None:
        return None
    parts: dict[str, object] = {}
    if request.cache_salt:
        parts["salt"] = request.cache_salt
    if (lora := request.lora_request) is not None:
        # By content as well: an adapter may change under its name, and disks remember.
        if (name := adapter_name(lora.lora_path)) is None:
            return None
        parts["lora"] = [lora.lora_name, name]
    return json.dumps(parts) if parts else ""
