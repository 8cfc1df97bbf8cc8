"""Chunks, requests and KV cache groups of an engine that publishes KV events."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

from lmcache_xpu.kv_connector.kv_events import KVEvents
from lmcache_xpu.tiers.residency import Change, chunk_name

CHUNK, BLOCK = 8, 4


class Database:
    """Names chunks, as LMCache's token database does."""

    chunk_size = CHUNK

    def __init__(self, *, partial: bool = False) -> None:
        self.config = SimpleNamespace(save_unfull_chunk=partial)

    def _get_init_hash(self) -> int:
        return 7

    def _hash_tokens(self, tokens: list[int], before: int) -> int:
        return int.from_bytes(hashlib.sha256(repr((before, tokens)).encode()).digest()[:8], "big")

    def names(self, tokens: list[int]) -> list[str]:
        name, names = self._get_init_hash(), []
        for start in range(0, len(tokens), CHUNK):
            name = self._hash_tokens(tokens[start : start + CHUNK], name)
            names.append(chunk_name(name))
        return names


def request(tokens: list[int], name: str = "r", salt: str | None = None, **other: Any) -> Any:
    hashes = [
        hashlib.sha256(repr((salt, tokens[: end + BLOCK])).encode()).digest()
        for end in range(0, len(tokens) - BLOCK + 1, BLOCK)
    ]
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        block_hashes=hashes,
        cache_salt=salt,
        mm_features=[],
        prompt_embeds=None,
        **{"lora_request": None} | other,
    )


def groups(*, drafts: int = 1) -> Any:
    """An engine's KV cache groups; those of a draft model are not stored."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    draft = SimpleNamespace(kv_cache_spec=None, enable_kv_transfer=False)
    return SimpleNamespace(kv_cache_groups=[*[draft] * drafts, KVCacheGroupSpec(["layer"], spec)])


def told(events: KVEvents, asked: Any, names: list[int] | None = None) -> None:
    events.admit(asked)
    meta = SimpleNamespace(req_id=asked.request_id, token_ids=names or asked.all_token_ids)
    events.describe(SimpleNamespace(requests=[meta]))


def changes(tier: str, names: list[str], held: bool = True) -> list[Change]:
    return [Change(tier, name, held) for name in names]
