"""Jobs of vLLM's tiering, spread over threads: what each delivered is kept until vLLM asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Transfer", "Transfers"]


@dataclass(slots=True)
class Transfer:
    """One job of vLLM: chunks between host memory and files.

    Args:
        job_id: vLLM's number.
        request: vLLM's name of the request.
        keys: of the chunks, in the job's order.
        is_load: whether it goes to host memory.
    """

    job_id: int
    request: str
    keys: Sequence[bytes]
    is_load: bool
    begun: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    moved: set[bytes] = field(default_factory=set)
    parts: int = 0  # that have not ended


class Transfers:
    """Runs jobs in threads that read and threads that write. Thread-safe.

    Args:
        threads: of each kind.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._readers = ThreadPoolExecutor(threads, "disk-read")
        self._writers = ThreadPoolExecutor(threads, "disk-write")
        self._lock = threading.Lock()
        self._ended: deque[Transfer] = deque()
        self._running: set[Future[None]] = set()
        self._queued_bytes = 0

    @property
    def queued_bytes(self) -> int:
        """Bytes of host memory that wait for a write, or are being written."""
        return self._queued_bytes

    def begin(self, transfer: Transfer, move: Callable[[int], bool], chunk_bytes: int) -> None:
        """Move each of a job's chunks, by its place in the job, in as many threads as there are.

        A chunk whose move returns False, or raises, is not among what was moved.
        """
        places = range(len(transfer.keys))
        parts = [places[at :: self._threads] for at in range(self._threads) if places[at:]]
        size = 0 if transfer.is_load else chunk_bytes * len(places)
        transfer.parts = len(parts)
        if not parts:
            self._ended.append(transfer)
        with self._lock:
            self._queued_bytes += size
        pool = self._readers if transfer.is_load else self._writers
        for part in parts:
            self._submit(pool, self._run, transfer, move, part, size)

    def refuse(self, transfer: Transfer) -> None:
        """End a job of which nothing is moved."""
        self._ended.append(transfer)

    def after_writes(self, call: Callable[[], object]) -> None:
        """Make a call in a thread once the writes queued before it have begun."""
        self._submit(self._writers, call)

    def ended(self) -> list[Transfer]:
        """Return the jobs that ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(self, seconds: float | None = None) -> None:
        """Wait until no job is queued or under way, or for so long."""
        with self._lock:
            running = list(self._running)
        wait(running, seconds)

    def close(self, seconds: float) -> None:
        """End what is queued within `seconds`; drop the rest, and wait for moves under way."""
        self.drain(seconds)
        for pool in (self._readers, self._writers):
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[..., object], *args: Any) -> None:
        with self._lock:
            future: Future[None] = pool.submit(call, *args)  # type: ignore[arg-type]
            self._running.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)

    def _run(
        self, transfer: Transfer, move: Callable[[int], bool], part: Iterable[int], size: int
    ) -> None:
        moved: list[bytes] = []
        try:
            moved.extend(transfer.keys[place] for place in part if move(place))
        finally:
            with self._lock:
                transfer.moved.update(moved)
                transfer.parts -= 1
                if not transfer.parts:
                    self._queued_bytes -= size
                    transfer.seconds = time.monotonic() - transfer.begun
                    self._ended.append(transfer)
