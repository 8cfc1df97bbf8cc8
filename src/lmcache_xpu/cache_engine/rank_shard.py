"""What a worker holds of the model's KV heads, and whether others use its CPU tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_xpu.tiers.shard import Shard

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts

__all__ = ["BORROWER_GIB", "may_share_cpu_tier", "rank_shard"]

SHARE = "xpu.share_cpu_tier"
BORROWER_GIB = 2**-6  # of the CPU tier of a worker that uses another one's: LMCache wants some


def rank_shard(rank: int, ranks: int, facts: EngineFacts, config: LMCacheEngineConfig) -> Shard:
    """Return a worker's shard.

    Args:
        rank: its number.
        ranks: of the engine.
        facts: of the engine's KV cache.
        config: LMCache's.
    """
    divisible = not (facts.opaque_blocks or config.use_layerwise)
    return Shard.of_rank(rank, ranks, facts.shared_heads, divisible=divisible)


def may_share_cpu_tier(shard: Shard, config: LMCacheEngineConfig) -> bool:
    """Whether workers that hold a shard have one CPU tier, the first one's, where all are near."""
    share = config.get_extra_config_value(SHARE, True)
    return shard.copies > 1 and bool(share)
