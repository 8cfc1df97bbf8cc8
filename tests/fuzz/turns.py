"""Threads of the package that run when the test says so, and as far as they wait for something."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from late_device import LateDevice


class Turns:
    """As a `ThreadPoolExecutor` of one thread, whose turn comes with `work`."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._tasks: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, task: Callable[..., object], *args: Any) -> None:
        self._tasks.append((task, args))

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._tasks.clear()
        while self.work():
            pass

    def work(self) -> bool:
        """Go on until the next wait or the end of a task; False if there is none."""
        if self._thread is None:
            if not self._tasks:
                return False
            self._thread = threading.Thread(target=self._run, args=self._tasks.popleft())
            self._thread.start()
        self._device.turn = self
        self._go.release()
        self._back.acquire()
        self._device.turn = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True

    def pause(self) -> None:
        """Let others run; called in the thread."""
        self._back.release()
        self._go.acquire()

    def _run(self, task: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._go.acquire()
        try:
            with self._device:  # whose operations are those of each thread
                task(*args)
        except BaseException as error:
            self._error = error
        self._thread = None
        self._back.release()


class LateFuture(Future[Any]):
    """Whoever waits for it lets others run meanwhile."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            if self._device.turn is not None:
                self._device.turn.pause()
            elif not self._device.finisher.work():
                raise AssertionError("nobody will say what is waited for")
        return super().result()
