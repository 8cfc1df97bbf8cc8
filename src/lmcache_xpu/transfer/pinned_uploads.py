"""Row numbers and addresses on their way to the device, by way of pinned memory that is kept.

A copy from pageable memory waits for all of the stream, and pinning memory anew may wait for the
device: 33 ms were seen beside a step of an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from lmcache_xpu.transfer.devices import Event, is_host
from lmcache_xpu.transfer.tuning import tuning_of

Upload = Callable[[torch.Tensor], torch.Tensor]  # from the host to the view's device


class _Copy(NamedTuple):
    """A copy that reads numbers `start` to `end - 1` of the ring until `done` is reached."""

    start: int
    end: int
    done: Event


class PinnedUploads:
    """A ring of pinned memory for one device.

    Args:
        device: where tensors go. On the host there is nothing to copy, and no ring.
        ring_bytes: pinned memory, allocated here; what the device is tuned for if not given.
    """

    def __init__(self, device: torch.device, ring_bytes: int | None = None) -> None:
        self._device = device
        self._copies: deque[_Copy] = deque()  # the oldest first
        self._next = 0
        if ring_bytes is None:
            ring_bytes = tuning_of(device.type).upload_ring_bytes
        size = 0 if is_host(device) else ring_bytes // torch.int64.itemsize
        self._ring = torch.empty(size, dtype=torch.int64, pin_memory=size > 0)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return contiguous int64 numbers of the host on the device, copied in the current stream.

        Waits only where the ring is full of copies that are not done yet.
        """
        if is_host(self._device):
            return tensor
        count, size = tensor.numel(), self._ring.numel()
        if count > size:
            return tensor.to(self._device)
        start = self._next if self._next + count <= size else 0
        end = start + count
        while self._copies and (
            self._copies[0].done.reached()
            or any(copy.start < end and start < copy.end for copy in self._copies)
        ):
            self._copies.popleft().done.synchronize()
        staged = self._ring.narrow(0, start, count).view(tensor.shape)
        staged.copy_(tensor)
        there = staged.to(self._device, non_blocking=True)
        copy = _Copy(start, end, Event(self._device))
        copy.done.record()
        self._copies.append(copy)
        self._next = end
        return there
