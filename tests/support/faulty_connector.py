"""The connector with a fault in one process; for tests.

The variable `LMCACHE_XPU_TEST_FAULT` is PROCESS:HOOK, such as `worker1:register_kv_caches` or
`scheduler:__init__`. The hook raises there, and in no other process. With one of `DEATHS` for a
hook, such as `worker0:lends`, the process is killed in the middle of its first load.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from lmcache_xpu.cache_engine.loans import Lender
from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_xpu.transfer.staging import Stager

FAULT_VARIABLE = "LMCACHE_XPU_TEST_FAULT"
# Where a process dies: a method, and how many calls of it go well before.
DEATHS = {
    "lends": (Lender, "lend", 0),  # what others wait for
    "loads": (Stager, "load", 1),  # the first of several groups of layers is there
}


class FaultyConnector(LMCacheXPUConnector):
    """Raises in one hook of one process, or kills it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        process = "scheduler"
        if role == KVConnectorRole.WORKER:
            process = f"worker{vllm_config.parallel_config.rank}"
        where, _, hook = os.environ.get(FAULT_VARIABLE, "").partition(":")
        if where != process:
            return
        if hook in DEATHS:
            self._die(f"planted in {process}, {hook}", *DEATHS[hook])
            return

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"planted in {process}, {hook}")

        if hook == "__init__":
            fail()
        setattr(self, hook, fail)

    def _die(self, last_words: str, kind: type, method: str, calls: int) -> None:
        """Let a method kill this process, when so many calls of it went well.

        It says before whether it lends its CPU tier or borrows that of another rank.
        """
        sound, count = getattr(kind, method), itertools.count()

        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(count) == calls:
                engine: Any = self._lmcache_engine.lmcache_engine
                [part] = [name for name in ("lender", "borrower") if getattr(engine, name)]
                os.write(2, f"{last_words}: a {part}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return sound(*args, **kwargs)

        setattr(kind, method, dying)
