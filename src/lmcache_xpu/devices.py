"""What differs between devices, each with its reason; nothing else branches on one.

cpu     has no streams: every operation is done when it returns, and engine memory and
        host memory are the same memory, so there is nothing to stage.
others  (xpu, cuda, ...) run asynchronously in streams, through device-generic PyTorch,
        and gather and scatter with a Triton kernel where Triton is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Event:
    """A point in a stream that other streams can wait for; nothing on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = None if is_host(device) else torch.Event(device=device)

    def record(self) -> None:
        """Put it at the end of the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Let the current stream wait for it. Does not wait itself."""
        if self._event is not None:
            self._event.wait()

    def synchronize(self) -> None:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """A stream beside the engine's own, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if is_host(device) else torch.Stream(device=device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream, in which operations are enqueued."""
        if self._stream is None:
            yield
        else:
            with self._stream:
                yield

    def after_engine(self) -> None:
        """Order what follows here after what the engine's current stream holds now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def before_engine(self) -> None:
        """Order what the engine enqueues from now on after this stream."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until everything in this stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def is_host(device: torch.device) -> bool:
    """Whether engine memory and LMCache's host memory are the same memory."""
    return device.type == "cpu"


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host tensor on the device, in the current stream; itself on the host.

    By way of pinned memory, because a copy from pageable memory waits for all of the stream.
    """
    if is_host(device):
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return not is_host(device) and importlib.util.find_spec("triton") is not None
