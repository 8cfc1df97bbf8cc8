"""LMCache's engine, once it is up: what must be true of it, and its tiers."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu import __version__, versions
from lmcache_xpu.errors import SeamError
from lmcache_xpu.tiers.residency import Residency
from lmcache_xpu.tiers.shard import shard_of
from lmcache_xpu.transfer.devices import most_pinned
from lmcache_xpu.transfer.pool_memory import PoolMemory

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


def limit_pinning(device: torch.device, *, shared: bool = False) -> None:
    """Keep LMCache's pool from a pinned allocation that fails or takes more; see `pool_memory`.

    Args:
        device: of the engine.
        shared: other workers will map the pool.
    """
    most = most_pinned(device)
    if most is not None or shared:
        from lmcache import device_ops

        PoolMemory.bind(device_ops, most or 0, os.environ, shared=shared)


def pool(engine: Any) -> torch.Tensor | None:
    """LMCache's host memory, where this worker has some."""
    manager = engine.storage_manager
    backend = manager and manager.storage_backends.get("LocalCPUBackend")
    memory: torch.Tensor | None = backend and getattr(backend.memory_allocator, "buffer", None)
    return memory


def check_healthy(adapter: Any) -> None:
    """Refuse an engine that goes on without a cache.

    Args:
        adapter: LMCache's connector for vLLM.

    Raises:
        SeamError: says why it is not healthy.
    """
    manager = adapter._manager
    if not manager.is_healthy():
        raise SeamError(
            f"LMCache without a cache: {manager._init_failed_reason or 'unhealthy'}",
            "LMCache up and healthy",
        )


def log_connector(adapter: Any, facts: EngineFacts) -> None:
    """Say which connector serves what, in the log."""
    software = versions.installed()
    logger.info(
        "lmcache-xpu %s: %s serves %s, KV cache %s%s (LMCache %s, vLLM %s)",
        __version__,
        type(adapter.lmcache_engine.gpu_connector).__name__,
        facts.device_type,
        facts.kv_layout,
        " in opaque blocks" if facts.opaque_blocks else "",
        software.lmcache,
        software.vllm,
    )


def check_tiers(engine: Any, config: LMCacheEngineConfig) -> None:
    """Refuse an engine without one of its tiers; LMCache only logs why one is missing.

    Raises:
        SeamError: names the tier, also a remote one that has no connector.
    """
    backends = engine.storage_manager.storage_backends
    for tier in tiers(config):
        if getattr(backends.get(tier), "connection", tier) is None or tier not in backends:
            raise SeamError(
                f"LMCache tiers {list(backends)}",
                f"the configured tier {tier!r} among them, and working",
                "Its error is in the log above, after 'Failed to'.",
            )


def watch_tiers(engine: Any) -> Residency:
    """Let all tiers tell of the chunks that they hold from now on."""
    residency = Residency(engine.num_layers if engine.use_layerwise else 1)
    for backend in engine.storage_manager.storage_backends.values():
        # LMCache wraps a remote connector in one that measures.
        connection = getattr(backend, "connection", None)
        watch = getattr(getattr(connection, "_connector", backend), "watch", None)
        if watch is not None:  # one of this package's
            watch(residency)
    return residency


def parts(adapter: Any) -> tuple[int, int]:
    """Return how many parts a chunk has in the workers' memory, and on disk or in a server."""
    engine = adapter.lmcache_engine
    shards = shard_of(engine.metadata).count
    shared = engine.lender is not None or engine.borrower is not None
    return shards if shared else int(engine.metadata.world_size), shards


def forget_entries(engine: Any) -> bool:
    """Remove what an engine stored in its own tiers: in host memory, and on disk.

    Call it from the engine's thread, between its steps. Other models' entries are left alone, and
    tiers that other engines use too.

    Returns:
        False if something is still there.
    """
    if (manager := getattr(engine, "storage_manager", None)) is None:
        return True
    for request in tuple(engine.lookup_pins):  # of requests that will be looked up again
        engine.lookup_unpin(request)
    backends = manager.storage_backends
    if (memory := backends.get("LocalCPUBackend")) is not None:
        model = engine.metadata.model_name
        memory.batched_remove([key for key in memory.get_keys() if key.model_name == model])
    gone = [tier.forget_model() for tier in backends.values() if hasattr(tier, "forget_model")]
    return all(gone)


def tiers(config: LMCacheEngineConfig) -> list[str]:
    """LMCache's names of the tiers that are configured beside the CPU tier."""
    remote = [f"RemoteBackend-{name}" for name in config.remote_storage_plugins or ()]
    return [*(config.storage_plugins or ()), *remote]
