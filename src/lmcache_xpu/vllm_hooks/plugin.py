"""vLLM's general plug-in: makes our connectors known by name in every vLLM process."""

from __future__ import annotations

from lmcache_xpu import versions
from lmcache_xpu.vllm_hooks import patches


def register() -> None:
    """Register the connectors by their names, and one under LMCache's stock name too.

    `LMCACHE_XPU_STOCK=1` leaves the stock name and vLLM's classes alone. Imports neither
    LMCache nor a connector: vLLM calls this in processes that may never need them. May be
    called again.
    """
    from vllm.distributed.kv_transfer.kv_connector import factory

    # With untested versions the connector's constructor says so; a plain vLLM goes on.
    if patches.register(factory) and versions.allowed(versions.installed()):
        patches.install()
