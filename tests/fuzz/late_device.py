"""A device on the host that runs late: what is enqueued runs when it must, in the worst order.

On the host every operation is done when it returns, so a wait that is missing costs nothing there.
Here gathers, scatters and copies (all those that are `non_blocking`) are put into streams. They run
when somebody waits for them, in an order that the events allow: streams that come first in `order`
run as far ahead as they can. With no order nothing runs but what is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from turns import LateFuture, Turns

from lmcache_xpu.copies import moves, pending_failures, step_loads, transfer_queue, transfers
from lmcache_xpu.transfer import host_copies, slots, staging

ENGINE, KERNELS, COPIES = "engine", "kernels", "copies"


class PlantedError(Exception):
    """An operation that can't be enqueued because the test says so."""


class _Mark:
    """A point in a stream."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self.passed = False


class _Stream:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.work: deque[tuple[str, Any]] = deque()  # run, pass or wait


class LateDevice(TorchFunctionMode):
    """Streams, and who runs next."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self._order = order
        self.engine = _Stream(ENGINE)
        self._streams = [self.engine]
        self._current = [self.engine]
        self._running = False
        self.finisher = _Finisher(self)
        self._until_failure = 0
        self.failed = False
        self.failures = 0
        self.turn: Turns | None = None  # of the thread that runs; None for the engine's
        self.threads: list[Turns] = []

    # What the package's devices do

    def event(self, device: torch.device) -> _Event:
        return _Event(self)

    def event_at(self, device: torch.device, stream: _SideStream | None = None) -> _Event:
        event = _Event(self)
        event.record(stream)
        return event

    def side_stream(self, device: torch.device, *, urgent: bool) -> _SideStream:
        stream = _SideStream(self, _Stream(KERNELS if urgent else COPIES))
        self._streams.append(stream.stream)
        return stream

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this lasts, the package is on this device."""
        transfer_of = staging.transfer_of

        with ExitStack() as stack:
            for place, name, value in (
                (staging, "event_at", self.event_at),
                (host_copies, "Event", self.event),
                (host_copies, "event_at", self.event_at),
                (staging, "SideStream", self.side_stream),
                (slots, "upload", self._upload),
                (staging, "upload", self._upload),
                (staging, "transfer_of", lambda view: _Late(self, transfer_of(view))),
                (step_loads, "ThreadPoolExecutor", lambda *args: self.finisher),
                (transfer_queue, "ThreadPoolExecutor", lambda **_: self._new_thread()),
                (transfers, "GRACE_S", 0.0),
                (transfers, "event_at", self.event_at),
                (moves, "SideStream", self.side_stream),
                (pending_failures, "Future", lambda: LateFuture(self)),
            ):
                stack.enter_context(mock.patch.object(place, name, value))
            stack.enter_context(self)
            yield

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running or not kwargs.get("non_blocking"):
            return func(*args, **kwargs)
        self.enqueue(lambda: func(*args, **kwargs))
        return args[0]

    def _upload(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        there, copy = torch.zeros_like(tensor), tensor.clone()
        self.enqueue(lambda: there.copy_(copy))
        return there

    def _new_thread(self) -> Turns:
        self.threads.append(Turns(self))
        return self.threads[-1]

    # Streams

    def enqueue(self, run: Callable[[], object]) -> None:
        """An operation, in the current stream."""
        if self._current[-1] is not self.engine:
            self._until_failure -= 1
            if not self._until_failure:
                self.failed = True
                self.failures += 1
                raise PlantedError
        self._current[-1].work.append(("run", run))

    def fail_at(self, number: int) -> None:
        """Of what is enqueued from now on beside the engine's, this one fails; 0 for none."""
        self._until_failure, self.failed = number, False

    def mark(self, stream: _Stream | None) -> _Mark:
        mark = _Mark(stream or self._current[-1])
        mark.stream.work.append(("pass", mark))
        return mark

    def wait(self, mark: _Mark, stream: _Stream | None) -> None:
        (stream or self._current[-1]).work.append(("wait", mark))

    @contextmanager
    def current(self, stream: _Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def pause(self) -> None:
        """A thread waits: others run first, unless it holds what they need."""
        if self.turn is not None and len(self._current) == 1:
            self.turn.pause()

    def until(self, mark: _Mark) -> None:
        """Run what must be run for this point, and with an order what comes before it."""
        while not mark.passed:
            if not self._order:
                self._next(mark.stream, needed=True)
            elif not self.step():
                raise AssertionError("the streams wait for each other")

    def step(self) -> bool:
        """One operation of the first stream that can go on; False if none can."""
        rank = {kind: place for place, kind in enumerate(self._order)}
        for stream in sorted(self._streams, key=lambda each: rank.get(each.kind, 0)):
            if self._next(stream, needed=False):
                return True
        return False

    def finish(self) -> None:
        """Run all of it."""
        while self.step():
            pass
        assert not any(stream.work for stream in self._streams), "a stream waits for ever"

    def _next(self, stream: _Stream, *, needed: bool) -> bool:
        if not stream.work:
            return False
        what, value = stream.work[0]
        if what == "wait" and not value.passed:
            if not needed:
                return False
            self.until(value)
        stream.work.popleft()
        if what == "pass":
            value.passed = True
        elif what == "run":
            self._running = True
            try:
                with torch.inference_mode():
                    value()
            finally:
                self._running = False
        return True


class _Event:
    """As `devices.Event`; each record is a point of its own, and a wait is for the last one."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._mark: _Mark | None = None

    def record(self, stream: _SideStream | None = None) -> None:
        self._mark = self._device.mark(None if stream is None else stream.stream)

    def wait(self, stream: _SideStream | None = None) -> None:
        if self._mark is not None:
            self._device.wait(self._mark, None if stream is None else stream.stream)

    def synchronize(self) -> None:
        self._device.pause()
        if self._mark is not None:
            self._device.until(self._mark)

    def reached(self) -> bool:
        if self._mark is not None and self._device.finisher.works:  # it asks until it is
            self._device.until(self._mark)
        return self._mark is None or self._mark.passed


class _SideStream:
    """As `devices.SideStream`."""

    def __init__(self, device: LateDevice, stream: _Stream) -> None:
        self._device = device
        self.stream = stream

    def current(self) -> Any:
        return self._device.current(self.stream)

    def reads(self, *tensors: torch.Tensor | None) -> None:
        """Nothing: memory is never given to others here."""

    def after_engine(self) -> None:
        self._device.wait(self._device.mark(None), self.stream)


class _Finisher:
    """The thread that finishes transfers, as work that is done when the test says so."""

    def __init__(self, device: LateDevice) -> None:
        self.works = False
        self._tasks: deque[tuple] = deque()

    def submit(self, *task: Any) -> _Finisher:
        self._tasks.append(task)
        return self

    def result(self) -> None:
        """Of what was submitted last."""
        while self.work():
            pass

    def shutdown(self) -> None:
        self.result()

    def work(self) -> bool:
        """Finish one transfer; False if there was none."""
        if not self._tasks:
            return False
        action, *args = self._tasks.popleft()
        self.works = True
        try:
            action(*args)
        finally:
            self.works = False
        return True


class _Late:
    """A transfer whose operations are enqueued."""

    def __init__(self, device: LateDevice, transfer: Any) -> None:
        self._device = device
        self._transfer = transfer

    def gather(self, *args: Any, **host: Any) -> None:
        self._device.enqueue(lambda: self._transfer.gather(*args, **host))

    def scatter(self, *args: Any, **host: Any) -> None:
        self._device.enqueue(lambda: self._transfer.scatter(*args, **host))

    def warm_up(self) -> bool:
        return self._transfer.warm_up()

    def aligned(self, addresses: torch.Tensor) -> bool:
        return self._transfer.aligned(addresses)
