"""The memory that a cache lends to a worker, and what LMCache's server answers about it."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from lmcache_xpu.cache.hit_places import ObjectSlots
from lmcache_xpu.cache.protocol import Answer, T
from lmcache_xpu.cache.seals import Seals
from lmcache_xpu.errors import HostMemoryError, SettingsError
from lmcache_xpu.transfer.devices import is_host, register_host, unregister_host
from lmcache_xpu.transfer.host_copies import LENT

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# A lease that was not used for so long is given up: the server may lend the memory to others.
LEASE_S = 20.0
DIRECTORY = Path("/dev/shm")
_POLL_S = 0.05


class GivenUpError(Exception):
    """A transfer was given up, for a reason of the metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LentMemory:
    """The pool of a cache, as flat bytes, mapped and pinned in this process.

    A server's stays mapped after that ended, with its bytes, until the last tensor of it goes.
    Pinning for the device that copies takes seconds for GiB, unless it is pinned already, and
    others release it.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        device: torch.device,
        *,
        is_pinned: bool = False,
        file: tuple[Path, tuple[int, int]] | None = None,  # a server's, and what identifies it
    ) -> None:
        self.pool = pool
        self._device, self._file = device, file
        self._pins = not (is_pinned or is_host(device)) and register_host(
            pool.data_ptr(), len(pool), device
        )
        self.pinned = LENT[pool.data_ptr()] = is_pinned or self._pins

    @classmethod
    def at(cls, address: int, size: int, device: torch.device, *, is_pinned: bool) -> Self:
        """Return the memory of a cache in this process, which outlives it."""
        memory = (ctypes.c_uint8 * size).from_address(address)
        return cls(torch.frombuffer(memory, dtype=torch.uint8), device, is_pinned=is_pinned)

    @classmethod
    def of_server(cls, name: str, size: int, device: torch.device) -> Self:
        """Map the memory of a server, a segment of this name and size in bytes.

        Raises SettingsError if there is no such segment here, or others can open it too.
        """
        path = _path(name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise SettingsError(
                f"a server whose shared memory {name!r} can't be opened here ({error.strerror})",
                "a server on this host, of this user, with the same /dev/shm",
                "In containers share the host's IPC namespace, or one volume at /dev/shm.",
            ) from error
        try:
            status = os.fstat(descriptor)
            # All prompts go there: it must not be a segment that somebody else has made.
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise SettingsError(
                    f"shared memory {name!r} of user {status.st_uid} with mode "
                    f"{stat.filemode(status.st_mode)}",
                    f"memory of user {os.geteuid()} alone",
                    "Run server and engine as one user.",
                )
            if status.st_size < size or not size:
                raise SettingsError(
                    f"shared memory {name!r} of {status.st_size} bytes", f"{size} or more"
                )
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        file = path, (status.st_dev, status.st_ino)
        return cls(torch.frombuffer(mapped, dtype=torch.uint8), device, file=file)

    @property
    def is_gone(self) -> bool:
        """Whether nobody can open it any more: its server ended, and its name was taken away."""
        return self._file is not None and not self._is_file(self._file[0])

    def is_at(self, name: str, size: int) -> bool:
        """Whether a segment of this name and size is this one, not one that came after it."""
        return size == len(self.pool) and self._is_file(_path(name))

    def _is_file(self, path: Path) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        return self._file is not None and self._file[1] == (status.st_dev, status.st_ino)

    def slot(self, offset: int, length: int, expected: int) -> torch.Tensor:
        """Return an object's bytes; HostMemoryError outside the pool or of another size."""
        if not 0 <= offset <= offset + length <= len(self.pool) or length != expected:
            raise HostMemoryError(
                f"an object of {length} bytes at {offset}",
                f"{expected} bytes within the {len(self.pool)} that the server lends",
            )
        return self.pool[offset : offset + length]

    def release(self) -> None:
        """Give the pinning back, once nothing copies any more; may be called again."""
        LENT.pop(self.pool.data_ptr(), None)
        if self._pins:
            self._pins = False
            unregister_host(self.pool.data_ptr(), self._device)


class Question(NamedTuple):
    """A cache is asked where chunks are that it has promised."""

    number: int
    key: Any  # of the chunks
    memory: LentMemory  # when it was asked
    begun: float  # when it was asked
    answer: Answer[ObjectSlots | None]  # that comes
    seals: Seals | None = None  # that the chunks should have; None where nobody else writes


class Server:
    """Whichever cache answers a worker, and its memory.

    An event is set while the cache answers, and cleared here when it does not; `ServerClient` sets
    it again, once this worker is registered anew.
    """

    def __init__(self, healthy: threading.Event, device: torch.device, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._healthy = healthy
        self._memory: LentMemory | None = None

    def lend(self, memory: LentMemory) -> None:
        """Take the memory of a cache in this process."""
        self._memory = memory

    def map(self, registered: Any) -> LentMemory | None:
        """Map the memory that a server lends, by its answer to a registration.

        Return that of an earlier server, to be released once nothing copies from or to it. Raises
        TimeoutError without an answer, SettingsError if no memory is lent that can be reached here.
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
        """The memory that it lends; GivenUpError if the cache is lost."""
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

    def answer(
        self,
        asked: Answer[T],
        given_up: Callable[[], bool] = lambda: False,  # nobody waits for it any more
        at_most_s: float = math.inf,  # that whoever asks may wait, if less than the cache has
    ) -> T:
        """Wait for an answer, and return it.

        Raises:
            GivenUpError: there is none.
            TransferError: it has another form than expected.
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

    def release(self) -> None:
        """Give the pinning of its memory back, once nothing copies."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None


def check_lease(begun: float) -> None:
    """Raise GivenUpError where the lease of memory may be over that was lent at this time."""
    if time.monotonic() - begun > LEASE_S:
        raise GivenUpError("late")


def _path(name: str) -> Path:
    bare = name.lstrip("/")
    if not bare or "/" in bare:
        raise SettingsError(f"shared memory named {name!r}", "a name without slashes")
    return DIRECTORY / bare
