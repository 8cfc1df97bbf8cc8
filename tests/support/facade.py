"""The connector to LMCache's own engine around halves that a test makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_xpu.stock.connector import LMCacheXPUConnector


class Facade(LMCacheXPUConnector):
    """vLLM's class, without an engine behind it."""

    def __new__(cls, **halves: Any) -> Any:
        return KVConnectorBase_V1.__new__(cls)

    def __init__(self, *, worker: Any = None, scheduler: Any = None) -> None:
        role = KVConnectorRole.SCHEDULER if worker is None else KVConnectorRole.WORKER
        config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))
        KVConnectorBase_V1.__init__(self, config, role, None)
        self._ended = False
        self._kv_cache_events = None
        if worker is not None:
            self.worker = worker
        else:
            self.scheduler = scheduler


Facade.__name__ = LMCacheXPUConnector.__name__  # by which vLLM sorts stats
