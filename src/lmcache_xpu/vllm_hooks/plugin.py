"""vLLM's general plug-in: makes our connector known by name in every vLLM process."""

from __future__ import annotations

from lmcache_xpu import versions
from lmcache_xpu.vllm_hooks import patches

STOCK_VARIABLE = patches.STOCK_VARIABLE


def register() -> None:
    """Register the connector as `LMCacheXPUConnector`, and under LMCache's stock name too.

    `LMCACHE_XPU_STOCK=1` leaves the stock name and vLLM's classes alone. Imports neither
    LMCache nor the connector: vLLM calls this in processes that may never need them. May be
    called again.
    """
    from vllm.distributed.kv_transfer.kv_connector import factory

    # With untested versions the connector's constructor says so; a plain vLLM goes on.
    if patches.register(factory) and versions.allowed(versions.installed()):
        patches.install()
