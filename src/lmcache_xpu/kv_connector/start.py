"""Starts LMCache for one half of the connector. Imported when a connector is made, not before."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from lmcache.integration.vllm.utils import lmcache_get_or_create_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from lmcache_xpu.cache_engine import health
from lmcache_xpu.cache_engine.config import LOADS
from lmcache_xpu.cache_engine.factory import Adapter
from lmcache_xpu.cache_engine.kv_cache_facts import promoted_windows
from lmcache_xpu.cache_engine.rank_shard import may_share_cpu_tier, rank_shard
from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.kv_connector.kv_events import KVEvents
from lmcache_xpu.kv_connector.load_policy import LoadPolicy, served_loads
from lmcache_xpu.kv_connector.pool_sharing import share_pool
from lmcache_xpu.kv_connector.rank_group import RankGroup
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.worker import WorkerSide
from lmcache_xpu.transfer.tuning import tuning_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts

__all__ = ["start_scheduler", "start_worker"]

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


def start_worker(
    config: VllmConfig, kv_cache_config: KVCacheConfig, facts: EngineFacts, *, publishes: bool
) -> tuple[Adapter, WorkerSide]:
    """Start LMCache in a worker.

    Args:
        config: of the engine.
        kv_cache_config: vLLM's, of its KV cache.
        facts: of the same.
        publishes: the engine publishes KV events of the tiers.

    Raises:
        SeamError: LMCache did not come up.
    """
    parallel, lmcache_config = config.parallel_config, lmcache_get_or_create_config()
    group = get_tp_group()
    ranks = RankGroup(group.cpu_group) if group.world_size > 1 else None
    shard = rank_shard(parallel.rank, parallel.world_size, facts, lmcache_config)
    # Its workers are processes of one container.
    near = parallel.distributed_executor_backend == "mp" and parallel.nnodes == 1
    shared = near and may_share_cpu_tier(shard, lmcache_config)
    facts = dataclasses.replace(facts, shares_cpu_tier=shared)
    health.limit_pinning(torch.device(facts.device_type), shared=shared and shard.stores)
    unfilled = UnfilledBlocks(facts.block_size)
    adapter = Adapter(config, KVConnectorRole.WORKER, facts, unfilled)
    health.check_healthy(adapter)
    health.log_connector(adapter, facts)
    worker = WorkerSide(
        adapter,
        config,
        unfilled,
        block_size=facts.block_size,
        # Where vLLM zeroes new blocks, it does so while it prepares a step.
        loads_early=not kv_cache_config.needs_kv_cache_zeroing,
        publishes=publishes,
        sharing=functools.partial(share_pool, shard=shard) if shared else None,
        ranks=ranks,
    )
    return adapter, worker


def start_scheduler(
    config: VllmConfig, kv_cache_config: KVCacheConfig, facts: EngineFacts, *, publishes: bool
) -> tuple[Adapter, SchedulerSide]:
    """Start LMCache in a scheduler; arguments and errors as of `start_worker`.

    Raises:
        SettingsError: KV events of chunks that can't be named.
    """
    adapter = Adapter(config, KVConnectorRole.SCHEDULER, facts)
    health.check_healthy(adapter)
    if windows := promoted_windows(config, kv_cache_config):
        logger.warning("%s. (docs: troubleshooting#windows)", windows.note)
    events = None
    if publishes:
        events = KVEvents(adapter.lookup_client.token_database, facts.block_size, kv_cache_config)
    policy = None
    if not kv_cache_config.needs_kv_cache_zeroing:  # of new blocks, also those that a load fills
        loads = (adapter.config.extra_config or {}).get(LOADS, "auto")
        loads = served_loads(loads, config.parallel_config.pipeline_parallel_size)
        policy = LoadPolicy(loads, tuning_of(facts.device_type))
    # A drafter's tokens come several at a time.
    unseen = not adapter.config.save_decode_cache and config.speculative_config is None
    return adapter, SchedulerSide(
        adapter, config, facts.block_size, policy, events, answers_unseen=unseen
    )
