"""LMCache's engine, once it is up: what must be true of it, and its tiers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lmcache_xpu import __version__, versions
from lmcache_xpu.errors import SeamError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_xpu.engine_facts import EngineFacts

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


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


def check_connector(adapter: Any, facts: EngineFacts) -> None:
    """Refuse an engine that came up with another connector; say which one serves what.

    Raises:
        SeamError: names the connector that was found.
    """
    from lmcache_xpu.connector import PagedMemConnector

    connector = getattr(adapter.lmcache_engine, "gpu_connector", None)
    if not isinstance(connector, PagedMemConnector):
        raise SeamError(
            f"{type(connector).__name__} in LMCache's engine",
            "a connector of lmcache-xpu",
            "Another package replaces LMCache's CreateGPUConnector after us.",
        )
    found = versions.installed()
    logger.info(
        "lmcache-xpu %s: %s serves %s, KV cache %s%s (LMCache %s, vLLM %s)",
        __version__,
        type(connector).__name__,
        facts.device_type,
        facts.kv_layout,
        " in opaque blocks" if facts.opaque_blocks else "",
        found.lmcache,
        found.vllm,
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


def tiers(config: LMCacheEngineConfig) -> list[str]:
    """LMCache's names of the tiers that are configured beside the CPU tier."""
    remote = [f"RemoteBackend-{name}" for name in config.remote_storage_plugins or ()]
    return [*(config.storage_plugins or ()), *remote]
