"""vLLM's general plug-in: makes our connector known by name in every vLLM process."""

from __future__ import annotations

import os

STOCK_VARIABLE = "LMCACHE_XPU_STOCK"

_MODULE = "lmcache_xpu.vllm_connector"
_CLASS = "LMCacheXPUConnector"


def register() -> None:
    """Register the connector as `LMCacheXPUConnector`, and under LMCache's stock name too.

    `LMCACHE_XPU_STOCK=1` leaves the stock name and LMCache itself alone. Imports neither
    LMCache nor the connector: vLLM calls this in processes that may never need them. May be
    called again.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM has no public way to ask for a name, or to give one a second meaning.
    registry = KVConnectorFactory._registry
    if _CLASS not in registry:
        KVConnectorFactory.register_connector(_CLASS, _MODULE, _CLASS)
    if os.environ.get(STOCK_VARIABLE, "") in ("", "0"):
        from lmcache_xpu import versions
        from lmcache_xpu.kv_connector import patches

        # With untested versions the connector's constructor says so; a plain vLLM goes on.
        registry["LMCacheConnectorV1"] = registry[_CLASS]
        if versions.allowed(versions.installed()):
            patches.install()
