"""Tasks that LMCache's server submits to a tier, and asks for later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.platform import create_event_notifier

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryTags, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
    from lmcache.v1.memory_management import MemoryObj

T = TypeVar("T")
NUMBERS = itertools.count()  # of tasks


class TaskResults(Generic[T]):
    """Results, each given out once; a descriptor becomes readable with each. Thread-safe."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._closed = False

    def fileno(self) -> int:
        """Return the file descriptor."""
        return int(self._notifier.fileno())

    def end(self, task: int, result: T) -> None:
        """Record the result of a task."""
        with self._lock:
            if not self._closed:
                self._results[task] = result
                self._notifier.notify()

    def take(self, task: int) -> T | None:
        """Return a task's result, the first time after its end; else None."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """Return all results that were not taken."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Drop later results, and close the file descriptor; idempotent."""
        with self._lock:
            self._closed = True
            self._notifier.close()


class Task:
    """A bit for each object of a task. Hits after its end change nothing.

    Thread-safe. After `seconds`, if given, it ends, whatever is missing, behind a call of
    `on_timeout`, which must not raise. Attributes: `number` of the task, and whether it is `over`.
    """

    def __init__(
        self,
        results: TaskResults[Bitmap],
        count: int,
        seconds: float | None = None,
        on_timeout: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = next(NUMBERS)
        self.over = False
        self._results = results
        self._hits = Bitmap(count)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, self.end, (on_timeout,))
            self._timer.daemon = True  # the end of the process does not wait for it
            self._timer.start()

    def hit(self, index: int, fill: Callable[[], bool] = lambda: True) -> bool:
        """Set an object's bit, unless the task is over; returns whether it was set.

        `fill` writes its memory, which is the task's until that ends, and says whether it did.
        """
        with self._lock:
            if self.over or not fill():
                return False
            self._hits.set(index)
            return True

    def end(self, before: Callable[[], None] = lambda: None) -> None:
        """Give out the hits, after a call; does nothing when the task is over."""
        with self._lock:
            if self.over:
                return
            self.over = True
        if self._timer is not None:
            self._timer.cancel()
        before()
        self._results.end(self.number, self._hits)


class TaskAnswers:
    """What both L2 adapters have in common. Stands before LMCache's interface."""

    RESIDENCY: ClassVar[str]  # of `MemoryResidency`

    def __init__(self, readers: int, memory: L1MemoryDesc | None) -> None:
        super().__init__()
        self._stored: TaskResults[L2StoreResult] = TaskResults()
        self._located: TaskResults[Bitmap] = TaskResults()
        self._loaded: TaskResults[Bitmap] = TaskResults()
        self._reads = ThreadPoolExecutor(readers, "tier-read")
        self._memory_bytes = memory.size if memory else 1 << 31  # not known

    def _load(self, task: Task, index: int, key: ObjectKey, obj: MemoryObj) -> None:
        """Read an object, and set its bit; must not raise."""
        raise NotImplementedError

    def _begin_load(self, task: Task, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        pairs = enumerate(zip(keys, objects, strict=True))
        loads = [self._reads.submit(self._load, task, index, *pair) for index, pair in pairs]
        after_all(loads, task.end)
        return task.number

    def get_memory_tags(self) -> MemoryTags:
        """Return what the tier is. LMCache 0.5.7 asks; 0.5.6 has no such names."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency[self.RESIDENCY])

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A bit for each object that was found; None before, and after the first time."""
        return self._located.take(task_id)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A bit for each object that was read; None before, and after the first time."""
        return self._loaded.take(task_id)

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a look-up has ended."""
        return self._located.fileno()

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return self._loaded.fileno()

    def _end_loads(self) -> None:
        self._reads.shutdown(cancel_futures=True)
        for results in (self._stored, self._located, self._loaded):
            results.close()


def after_all(parts: Sequence[Future[Any]], call: Callable[[], object]) -> None:
    """Call a function when all futures have ended, in the last one's thread; it must not raise."""
    left = itertools.count(len(parts), -1)  # `next` is atomic

    def ended(part: object = None) -> None:
        if not next(left):
            call()

    for part in parts:
        part.add_done_callback(ended)
    ended()
