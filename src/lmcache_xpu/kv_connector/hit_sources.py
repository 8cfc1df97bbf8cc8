"""Which tiers a hit comes from, in vLLM's words for its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # older versions of vLLM have neither these words nor the question
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

__all__ = ["hit_sources", "lone_source"]

SOURCES = {
    "LocalCPUBackend": "HOST",
    "LocalDiskBackend": "DISK",
    "disk": "DISK",  # the tier of this package
}


def lone_source(config: Any) -> CacheHitSource | None:
    """The source of every hit, if there is the CPU tier alone."""
    others = ("storage_plugins", "remote_storage_plugins", "remote_url", "local_disk", "enable_p2p")
    if any(getattr(config, name, None) for name in others):
        return None
    return _source("LocalCPUBackend")


def hit_sources(
    pinned: Mapping[str, Sized], objects: int, chunk_tokens: int, tokens: int
) -> dict[CacheHitSource, int]:
    """Split a hit by the tiers in which a look-up found its chunks.

    Args:
        pinned: LMCache's, its tiers in the order of the prompt, with the objects found in each.
        objects: of a chunk.
        chunk_tokens: of a chunk.
        tokens: of the hit, the last of what was found; the engine has those before.

    Returns:
        Tokens of each source, `tokens` in all; empty if the tiers hold less than that.
    """
    ends, end = [], 0
    for name, keys in pinned.items():
        end += len(keys) // objects * chunk_tokens
        ends.append((end, _source(name)))
    counts: dict[CacheHitSource, int] = {}
    if end < tokens:
        return counts
    begin = end - tokens
    for end, source in ends:
        if end > begin:
            counts[source] = counts.get(source, 0) + end - begin
            begin = end
    return counts


def _source(tier: str) -> CacheHitSource:
    """vLLM's word for a tier of LMCache's."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource[SOURCES.get(tier, "EXTERNAL_UNSPECIFIED")]
