"""The blocks of a chunk, as vLLM's own KV events describe them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from lmcache_xpu.versions import vllm

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["ChunkBlocks"]


@dataclass(slots=True)
class ChunkBlocks:
    """What events say of a chunk.

    Args:
        start: its first token's number in the prompt.
        tokens: of its blocks.
        hashes: vLLM's, one per block.
        parent: hash of the block before; None for the first of a prompt.
        extra_keys: what else vLLM hashes, one per block.
        lora: number and name of the adapter.
        tiers: that hold it, as far as was told.
    """

    start: int
    tokens: array[int]
    hashes: list[Any]
    parent: Any
    extra_keys: list[Any]
    lora: tuple[int | None, str | None]
    tiers: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, request: Request, blocks: range, block_tokens: int) -> Self:
        """Describe some blocks of a request as vLLM's own events do."""
        from vllm.v1.core.kv_cache_utils import (
            generate_block_hash_extra_keys,
            maybe_convert_block_hash,
        )

        first, after = blocks[0], blocks[-1] + 1
        keys, image = [], 0
        for block in blocks:
            start = block * block_tokens
            key, image = generate_block_hash_extra_keys(request, start, start + block_tokens, image)
            keys.append(key)
        lora = request.lora_request
        start = first * block_tokens
        return cls(
            start=start,
            tokens=array("I", request.all_token_ids[start : after * block_tokens]),
            hashes=[maybe_convert_block_hash(h) for h in request.block_hashes[first:after]],
            parent=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
            extra_keys=vllm.event_extra_keys(keys),
            lora=(None, None) if lora is None else (lora.adapter_id, lora.name),
        )
