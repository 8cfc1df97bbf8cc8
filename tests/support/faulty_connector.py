"""The connector with a fault in one process; for tests.

The variable `LMCACHE_XPU_TEST_FAULT` is PROCESS:HOOK, such as `worker1:register_kv_caches` or
`scheduler:__init__`. The hook raises there, and in no other process.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector

FAULT_VARIABLE = "LMCACHE_XPU_TEST_FAULT"


class FaultyConnector(LMCacheXPUConnector):
    """Raises in one hook of one process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        process = "scheduler"
        if role == KVConnectorRole.WORKER:
            process = f"worker{vllm_config.parallel_config.rank}"
        where, _, hook = os.environ.get(FAULT_VARIABLE, "").partition(":")
        if where != process:
            return

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"planted in {process}, {hook}")

        if hook == "__init__":
            fail()
        setattr(self, hook, fail)
