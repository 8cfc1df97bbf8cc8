"""What differs between devices, each with its reason; nothing else branches on one.

cpu     has no streams: every operation is done when it returns, and engine memory and
        host memory are the same memory, so there is nothing to stage.
others  (xpu, cuda, ...) run asynchronously in streams, through device-generic PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream beside the engine's own, on one device.

    Everything enqueued inside `behind_engine` runs after what the engine's current stream holds
    at that moment, and beside what the engine enqueues later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if is_host(device) else torch.Stream(device=device)

    @contextmanager
    def behind_engine(self) -> Iterator[None]:
        """Make this the current stream, ordered after the engine's. Does not wait."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def before_engine(self) -> None:
        """Order what the engine enqueues from now on after this stream. Does not wait."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until everything in this stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def is_host(device: torch.device) -> bool:
    """Whether engine memory and LMCache's host memory are the same memory."""
    return device.type == "cpu"
