"""What must be true of LMCache's engine: memory that can be pinned, a cache, and all its tiers."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu import __version__, versions
from lmcache_xpu.errors import SeamError
from lmcache_xpu.transfer.devices import most_pinned
from lmcache_xpu.transfer.pool_memory import PoolMemory

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_xpu.model.kv_cache_facts import EngineFacts

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

POOL = "LocalCPUBackend"


def limit_pinning(device: torch.device) -> None:
    """Keep LMCache's pool from a pinned allocation that fails or takes more; see `pool_memory`."""
    if (most := most_pinned(device)) is not None:
        from lmcache import device_ops

        PoolMemory.bind(device_ops, most, os.environ)


def pool(engine: Any) -> torch.Tensor | None:
    """Return LMCache's host memory, where this worker has some."""
    backend = engine.storage_manager.storage_backends.get(POOL)
    memory: torch.Tensor | None = backend and getattr(backend.memory_allocator, "buffer", None)
    return memory


def check_healthy(healthy: bool) -> None:
    """Refuse an LMCache that goes on without a cache.

    Raises:
        SeamError: LMCache's error is in the log.
    """
    if not healthy:
        raise SeamError(
            "LMCache without a cache", "LMCache up and healthy", "Its error is in the log above."
        )


def check_tiers(engine: Any, config: LMCacheEngineConfig) -> None:
    """Refuse an engine without one of its tiers; LMCache only logs why one is missing.

    Raises:
        SeamError: names the tier.
    """
    backends = engine.storage_manager.storage_backends
    for tier in config.storage_plugins or ():
        if tier not in backends:
            raise SeamError(
                f"LMCache tiers {list(backends)}",
                f"the configured tier {tier!r} among them, and working",
                "Its error is in the log above, after 'Failed to'.",
            )


def log_connector(engine: Any, facts: EngineFacts) -> None:
    """Log which connector serves what."""
    software = versions.installed()
    logger.info(
        "lmcache-xpu %s: %s serves %s, KV cache %s%s (LMCache %s, vLLM %s)",
        __version__,
        type(engine.gpu_connector).__name__,
        facts.device_type,
        facts.kv_layout,
        " in opaque blocks" if facts.opaque_blocks else "",
        software.lmcache,
        software.vllm,
    )
