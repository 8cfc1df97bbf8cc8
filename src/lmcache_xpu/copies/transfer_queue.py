"""Transfers in threads beside the engine: stores have one thread, loads another."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lmcache_xpu.transfer.devices import Event


class Phase(enum.Enum):
    """How far a transfer is."""

    ASKING = enum.auto()  # waits for its turn, or for the server
    COPYING = enum.auto()
    ENQUEUED = enum.auto()  # all copies from and to the engine's blocks are on their way
    ENDED = enum.auto()


class Transfer:
    """A store or a load of a request, which reads or writes these blocks of the engine."""

    def __init__(self, request: str, blocks: frozenset[int]) -> None:
        self.request = request
        self.blocks = blocks
        self.result: bool | None = None  # whether it succeeded; None until it has ended
        self.read: list[Event] = []  # the engine's blocks were read
        self._phase = Phase.ASKING
        self._changed = threading.Condition()

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended before it copied anything."""
        return self._phase is Phase.ENDED

    def begin_copying(self) -> bool:
        """Begin to copy; False if it was cancelled."""
        with self._changed:
            if self._phase is not Phase.ASKING:
                return False
            self._phase = Phase.COPYING
            return True

    def enqueued(self, read: list[Event]) -> None:
        """All copies from the engine's blocks are on their way."""
        with self._changed:
            self.read, self._phase = read, Phase.ENQUEUED
            self._changed.notify_all()

    def end(self, result: bool) -> None:
        """Nothing of it is on its way any more; the first result counts."""
        with self._changed:
            self._phase = Phase.ENDED
            if self.result is None:
                self.result = result
            self._changed.notify_all()

    def leave_blocks(self, deadline: float) -> None:
        """Let the engine's current stream wait until the blocks were read.

        Waits on this thread until the copies are enqueued, and cancels at the deadline what has
        not begun to copy.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._phase is not Phase.ASKING, max(0.0, deadline - time.monotonic())
            )
            if self._phase is Phase.ASKING:
                self._phase = Phase.ENDED
            self._changed.wait_for(lambda: self._phase is not Phase.COPYING)
            for event in self.read:
                event.wait()


class TransferQueue:
    """A thread of this name, which does transfers one after another.

    `failed` is called with the request of a transfer that failed, and why.
    """

    def __init__(self, name: str, failed: Callable[[str, Exception], None]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"lmcache-xpu-{name}")
        self._failed = failed
        self._transfers: set[Transfer] = set()
        self._lock = threading.Lock()

    def add(self, transfer: Transfer, *steps: Callable[[], None]) -> None:
        """Do the steps of a transfer when those before it have ended; an error fails it."""

        def run() -> None:
            succeeds = False
            try:
                for step in steps:
                    step()
                succeeds = True
            except Exception as error:  # whatever it is: it costs a hit, and the engine goes on
                self._failed(transfer.request, error)
            finally:
                with self._lock:
                    self._transfers.discard(transfer)
                transfer.end(succeeds)

        with self._lock:
            self._transfers.add(transfer)
        self._thread.submit(run)

    def transfers(self) -> list[Transfer]:
        """Return those that have not ended."""
        with self._lock:
            return list(self._transfers)

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for transfer in self.transfers():
            transfer.end(False)
