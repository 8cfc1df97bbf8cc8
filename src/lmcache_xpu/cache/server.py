"""LMCache's server as a worker sees it: what it answers, and the memory that it lends."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.cache.lent_memory import LentMemory
from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from lmcache_xpu.cache.local_cache import LocalCache

__all__ = ["LEASE_S", "GivenUpError", "Server"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# A lease that was not used for so long is given up: the server may lend the memory to others.
LEASE_S = 20.0
_POLL_S = 0.05


class GivenUpError(Exception):
    """A transfer was given up.

    Args:
        reason: for the metrics.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Server:
    """Whichever server answers.

    Args:
        client: LMCache's.
        instance_id: of this worker.
        healthy: set while the server answers. Cleared here when it does not; `ServerClient` sets
            it again, once this worker is registered anew.
        device: that copies from and to lent memory.
        timeout_s: that the server has for an answer.
    """

    def __init__(
        self,
        client: Any,
        instance_id: int,
        healthy: threading.Event,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.client = client
        self.instance_id = instance_id
        self.device = device
        self._healthy = healthy
        self.timeout_s = timeout_s
        self._memory: LentMemory | None = None
        self.local: LocalCache | None = None

    def lend(self, local: LocalCache) -> None:
        """Take the memory of a cache in this process."""
        self.local, self._memory = local, local.memory()

    def map(self, registered: Any) -> LentMemory | None:
        """Map the memory that a server lends, by its answer to a registration.

        Returns:
            The memory of an earlier server, to be released once nothing copies from or to it.

        Raises:
            TimeoutError: no answer.
            SettingsError: a server that lends no memory that can be reached from here.
        """
        answer = registered.result(timeout=self.timeout_s)
        name, size = getattr(answer, "shm_name", ""), getattr(answer, "pool_size", 0)
        if not name or not size:
            raise SettingsError(
                "an LMCache server that lends no shared memory",
                "one that was started with --supported-transfer-mode auto, --no-l1-use-lazy and "
                "--shm-name NAME",
                "It lends none either where /dev/shm is smaller than its memory: see its log.",
            )
        before = self._memory
        if before is not None and before.is_at(name, size):
            return None
        self._memory = LentMemory.of_server(name, size, self.device)
        pinned = ", pinned" if self._memory.pinned else ""
        logger.info("LMCache's server lends %.1f GiB%s", size / 2**30, pinned)
        return before

    @property
    def lent(self) -> LentMemory:
        """The memory that it lends.

        Raises:
            GivenUpError: the server is lost.
        """
        if self._memory is None or not self._healthy.is_set():
            raise GivenUpError("server")
        return self._memory

    def take_gone(self) -> LentMemory | None:
        """Return memory of a lost server that nobody lends any more, and forget it."""
        memory = self._memory
        if memory is None or self._healthy.is_set() or not memory.is_gone:
            return None
        self._memory = None
        return memory

    def pinned(self, address: int) -> bool | None:
        """Whether its memory at this address is pinned; None for other memory."""
        memory = self._memory
        if memory is None or memory.pool.data_ptr() != address:
            return None
        return memory.pinned

    def answer(
        self,
        asked: Any,
        given_up: Callable[[], bool] = lambda: False,
        at_most_s: float = math.inf,
    ) -> Any:
        """Wait for an answer.

        Args:
            asked: LMCache's future.
            given_up: whether nobody waits for it any more.
            at_most_s: that whoever asks may wait, where that is less than the server has.

        Raises:
            GivenUpError: there is none.
        """
        timeout_s = min(self.timeout_s, at_most_s)
        deadline = time.monotonic() + timeout_s
        while not asked.wait(timeout=_POLL_S):
            if given_up():
                raise GivenUpError("overtaken")
            if not self._healthy.is_set():
                raise GivenUpError("server")
            if time.monotonic() > deadline:
                self._healthy.clear()
                logger.warning(
                    "LMCache's server did not answer within %.1f s: nothing is stored or loaded "
                    "until it does (docs: troubleshooting#server-lost)",
                    timeout_s,
                )
                raise GivenUpError("server")
        return asked.result(timeout=0)

    def leave(self) -> None:
        """Wait for no answer any more."""
        self._healthy.clear()

    def release(self) -> None:
        """Give the pinning of its memory back, once nothing copies."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None


def check_lease(begun: float) -> None:
    """Give a transfer up whose lease may be over.

    Args:
        begun: when the memory was lent.

    Raises:
        GivenUpError: it may.
    """
    if time.monotonic() - begun > LEASE_S:
        raise GivenUpError("late")


def union(blocks: Collection[Collection[int]]) -> frozenset[int]:
    """Return the blocks of all groups; vLLM numbers them together."""
    return frozenset(block for ids in blocks for block in ids)
