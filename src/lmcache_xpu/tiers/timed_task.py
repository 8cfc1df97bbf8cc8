"""A task of LMCache's server that ends in time, with the hits that it has by then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lmcache.lmcache_native import Bitmap

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_xpu.tiers.disk.task_results import TaskResults

__all__ = ["TimedTask"]


class TimedTask:
    """A bit for each object of a task. What comes after its end changes nothing.

    Thread-safe.

    Args:
        results: where LMCache asks for them.
        count: of objects.
        seconds: after which the task ends, whatever is missing.
        late: called before that, in a thread of its own; must not raise.

    Attributes:
        number: of the task.
    """

    def __init__(
        self, results: TaskResults[Bitmap], count: int, seconds: float, late: Callable[[], None]
    ) -> None:
        self.number = results.begin()
        self._results = results
        self._hits = Bitmap(count)
        self._late = late
        self._lock = threading.Lock()
        self._over = False
        self._timer = _Timer(seconds, self._end_late)
        self._timer.start()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def hit(self, index: int, fill: Callable[[], bool] = lambda: True) -> bool:
        """Set the bit of an object, unless the task is over.

        Args:
            index: of the object.
            fill: writes its memory, which is the task's until that ends; says whether it did.

        Returns:
            Whether the object is a hit.
        """
        with self._lock:
            if self._over or not fill():
                return False
            self._hits.set(index)
            return True

    def end(self) -> None:
        """Give out the hits, unless that was done before."""
        if self._close():
            self._timer.cancel()
            self._results.end(self.number, self._hits)

    def _end_late(self) -> None:
        if self._close():
            self._late()
            self._results.end(self.number, self._hits)

    def _close(self) -> bool:
        with self._lock:
            was_open, self._over = not self._over, True
            return was_open


class _Timer(threading.Timer):
    """One for which the end of the process does not wait."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        super().__init__(seconds, call)
        self.daemon = True
