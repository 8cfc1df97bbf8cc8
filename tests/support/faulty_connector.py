"""The connector with a fault in one process; for tests.

The variable `LMCACHE_XPU_TEST_FAULT` is PROCESS:HOOK, such as `worker1:register_kv_caches` or
`scheduler:__init__`. The hook raises there, and in no other process. With one of `DEATHS` for a
hook, such as `worker0:loads`, the process is killed in the middle of its first load.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_xpu.connector.connector import LMCacheXPUServerConnector

FAULT_VARIABLE = "LMCACHE_XPU_TEST_FAULT"
# Where a process dies: a method of the class that copies a group's chunks.
DEATHS = {"loads": "load", "stores": "store"}


class FaultyConnector(LMCacheXPUServerConnector):
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
            _die_in(DEATHS[hook], f"planted in {process}, {hook}")
            return

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"planted in {process}, {hook}")

        if hook == "__init__":
            fail()
        setattr(self, hook, fail)


def _die_in(method: str, last_words: str) -> None:
    """Let a method kill this process, when half of the chunks are moved."""
    from lmcache_xpu.copies.group_copies import GroupCopies

    sound = getattr(GroupCopies, method)

    def dying(copies: Any, chunks: Any, objects: Any) -> Any:
        sound(copies, chunks[: len(chunks) // 2], objects[: len(objects) // 2])
        os.write(2, f"{last_words}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(GroupCopies, method, dying)
