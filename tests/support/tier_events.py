"""The half of an engine that publishes KV events of its tiers, and what these gain and lose."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

from lmcache_xpu.cache.local_cache import PromptKeys
from lmcache_xpu.cache.local_options import CPU, DISK, SHARED
from lmcache_xpu.connector.kv_events import KVEvents
from lmcache_xpu.connector.tracked_request import BlockSizes, TrackedRequest

CHUNK, BLOCK, MODEL = 8, 4, "model"


def request(tokens: list[int], name: str = "r", salt: str | None = None, **other: Any) -> Any:
    hashes = [
        hashlib.sha256(repr((salt, tokens[: end + BLOCK])).encode()).digest()
        for end in range(0, len(tokens) - BLOCK + 1, BLOCK)
    ]
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        block_hashes=hashes,
        cache_salt=salt,
        mm_features=[],
        prompt_embeds=None,
        sampling_params=SimpleNamespace(extra_args={}),
        **{"lora_request": None} | other,
    )


def groups(*windows: int | None, drafts: int = 1, block: int = BLOCK) -> Any:
    """An engine's KV cache groups, by their windows; those of a draft model are not stored."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    size: dict[str, Any] = {"block_size": block, "num_kv_heads": 1, "head_size": 8}
    size["dtype"] = torch.float32
    stored = [
        FullAttentionSpec(**size)
        if window is None
        else SlidingWindowSpec(**size, sliding_window=window)
        for window in windows or (None,)
    ]
    draft = SimpleNamespace(kv_cache_spec=None, enable_kv_transfer=False)
    return SimpleNamespace(
        kv_cache_groups=[
            *[draft] * drafts,
            *(KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(stored)),
        ]
    )


class Cache:
    """A cache whose tiers are asked nothing, and listened to."""

    chunk_tokens, model_name = CHUNK, MODEL

    def listen(self, listener: Any) -> None:
        self.listeners = {tier: listener(tier) for tier in (CPU, DISK, SHARED)}


class Engine:
    """Its requests, and its tiers' listeners.

    Args:
        kv_cache: its KV cache groups.
        stored: how many of them are stored.
    """

    def __init__(self, kv_cache: Any = None, stored: int = 1) -> None:
        self._cache, self._stored = Cache(), stored
        self.events = KVEvents(self._cache, kv_cache or groups())

    def tracked(self, asked: Any, salt: str = "salt") -> TrackedRequest:
        keys = PromptKeys(MODEL, salt, self._stored)
        return TrackedRequest(asked, salt, BlockSizes(CHUNK, [BLOCK], BLOCK), keys)

    def told(self, asked: Any, salt: str = "salt") -> TrackedRequest:
        """Describe all chunks of a request, which is stored or hit."""
        tracked = self.tracked(asked, salt)
        self.tell(tracked, len(asked.all_token_ids))
        return tracked

    def tell(self, tracked: TrackedRequest, tokens: int) -> None:
        """Describe a request of which so many tokens are computed."""
        tracked.stored = tokens // CHUNK * CHUNK
        self.events.describe(tracked)

    def keys(self, tokens: list[int], salt: str = "salt", group: int = 0) -> list[Any]:
        """Return LMCache's keys of a prompt without a salt of its own."""
        return self.tracked(request(tokens), salt).key_tokens().by_group[group]

    def change(self, tier: str, keys: list[Any], *, held: bool = True) -> None:
        """As LMCache tells of a tier."""
        listener = self._cache.listeners[tier]
        if tier == CPU and held:
            listener.on_l1_keys_write_finished(keys)
        elif tier == CPU:
            listener.on_l1_keys_deleted_by_manager(keys)
        elif held:
            listener.on_l2_keys_stored(keys, [0] * len(keys))
        else:
            listener.on_l2_keys_deleted(keys)
