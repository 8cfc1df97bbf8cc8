"""Copies between the device and LMCache's host memory, pinned or not.

A device copies by itself only from and to pinned memory. Where LMCache did not pin its pool (see
`pool_memory`) it is pinned here, if the driver allows that. If not, copies go by way of a small
ring of pinned memory, and the calling thread moves the bytes between that and LMCache's memory.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lmcache_xpu.transfer.devices import Event, batched_copy, is_host, register_host
from lmcache_xpu.transfer.host_memory import Copies, HostMemory, Segments
from lmcache_xpu.transfer.tuning import tuning_of

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

Upload = Callable[[torch.Tensor], torch.Tensor]  # from the host to the view's device


class Pinning(enum.IntEnum):
    """How an allocation of host memory is pinned."""

    NONE = 0
    REGISTERED = 1  # after it was allocated
    ALLOCATED = 2  # from the beginning


class HostCopies:
    """Copies between a device and host memory, of which each allocation is looked at once.

    Args:
        device: that copies.
        ring_bytes: pinned memory of one of the two steps of a ring, allocated when it is needed.
        register: pins memory, by address and size.
    """

    def __init__(
        self,
        device: torch.device,
        ring_bytes: int,
        register: Callable[[int, int, torch.device], bool] = register_host,
    ) -> None:
        self._device = device
        self._register = register
        self._batched = batched_copy(device)
        self._ring_bytes = ring_bytes
        self._ring: list[_Step] = []
        self._turn = 0
        self._pinning: dict[tuple[int, int], Pinning] = {}
        # Addresses of the allocation that was looked up last, and how it is pinned.
        self._last, self._last_pinning = range(0), Pinning.NONE

    def pinned(
        self, memory: Sequence[torch.Tensor], at_least: Pinning = Pinning.REGISTERED
    ) -> bool:
        """Whether all of this memory is pinned so; the device copies from and to it by itself.

        Pins a pool that is not, which takes seconds for GiB.
        """
        memory = HostMemory.of(memory)
        if memory and self._pinning_of(memory[0]) and all(at in self._last for at in memory.reach):
            return self._last_pinning >= at_least  # a pool is one allocation
        return all(self._pinning_of(part) >= at_least for part in memory)

    def forget(self, memory: torch.Tensor) -> None:
        """Forget an allocation that is about to go; another one may come to its place."""
        storage = memory.untyped_storage()
        self._pinning.pop((storage.data_ptr(), storage.nbytes()), None)
        self._last, self._last_pinning = range(0), Pinning.NONE

    @property
    def copies_in_batches(self) -> bool:
        """Whether many small copies are about as fast as few large ones."""
        return self._batched is not None

    def load(
        self,
        target: torch.Tensor,
        chunks: Sequence[torch.Tensor],
        segments: Segments,
        *,
        pinned: bool,
        copies: Copies | None = None,
    ) -> None:
        """Enqueue copies from the host; chunks may be reused when the current stream is done.

        Args:
            target: bytes on the device for all segments.
            chunks: bytes, flat, one tensor per chunk; `pinned` memory or not.
            segments: of these chunks.
            pinned: what `pinned` said of them. If not, this waits for the copy before the last.
            copies: of the segments, see `Segments.copies`; None for a call for each.
        """
        if not pinned:
            step = self._next()
            staged = step.memory(segments.nbytes)
            torch._foreach_copy_(segments.split(staged), segments.tensors(chunks))
            target.copy_(staged, non_blocking=True)
            step.used.record()
        elif self._batched is not None and copies is not None and len(segments) > 1:
            sources, places, sizes = _without_empty(copies, segments)
            self._batched(sources, places + target.data_ptr(), sizes)
        else:
            parts = segments.split(target)
            torch._foreach_copy_(parts, segments.tensors(chunks), non_blocking=True)

    def store(
        self,
        chunks: Sequence[torch.Tensor],
        segments: Segments,
        source: torch.Tensor,
        *,
        pinned: bool,
        copies: Copies | None = None,
    ) -> None:
        """Enqueue copies to the host; complete after `flush` when the current stream is done.

        Arguments as for `load`, the other way.
        """
        if not pinned:
            step = self._next()
            staged = step.memory(segments.nbytes)
            staged.copy_(source, non_blocking=True)
            step.used.record()
            step.pending = segments.tensors(chunks), segments.split(staged)
        elif self._batched is not None and copies is not None and len(segments) > 1:
            targets, places, sizes = _without_empty(copies, segments)
            self._batched(places + source.data_ptr(), targets, sizes)
        else:
            parts = segments.tensors(chunks)
            torch._foreach_copy_(parts, segments.split(source), non_blocking=True)

    def flush(self) -> None:
        """Finish stores to memory that is not pinned; waits for them."""
        for offset in range(1, len(self._ring) + 1):  # the older one first
            self._ring[(self._turn + offset) % len(self._ring)].finish()

    def _next(self) -> _Step:
        if not self._ring:
            self._ring = [_Step(self._device, self._ring_bytes) for _ in range(2)]
        self._turn = (self._turn + 1) % len(self._ring)
        step = self._ring[self._turn]
        step.finish()
        return step

    def _pinning_of(self, part: torch.Tensor) -> Pinning:
        if part.data_ptr() in self._last:
            return self._last_pinning
        storage = part.untyped_storage()
        allocation = (storage.data_ptr(), storage.nbytes())
        pinning = self._pinning.get(allocation)
        if pinning is None:
            pinning = self._pinning[allocation] = self._pin(part, *allocation)
        if pinning:
            self._last, self._last_pinning = range(allocation[0], sum(allocation)), pinning
        return pinning

    def _pin(self, part: torch.Tensor, address: int, size: int) -> Pinning:
        if part.is_pinned():
            return Pinning.ALLOCATED
        if size < tuning_of(self._device.type).pool_bytes:
            return Pinning.NONE
        registered = self._register(address, size, self._device)
        logger.info(
            "host memory of %.1f GiB was not pinned; %s (docs: troubleshooting#not-pinned)",
            size / 2**30,
            f"it is now, for {self._device}"
            if registered
            else f"{self._device} can't pin it, so copies go through a ring of pinned memory",
        )
        return Pinning.REGISTERED if registered else Pinning.NONE


def _without_empty(copies: Copies, segments: Segments) -> Copies:
    """Return copies without those of no bytes, which the driver refuses."""
    if all(segments.sizes):
        return copies
    there = copies.sizes > 0
    return Copies(*(numbers[there] for numbers in copies))


class _Step:
    """Pinned memory for one copy at a time."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.used = Event(device)
        self.pending: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())
        self._pin = not is_host(device)
        self._memory = self._allocated(size)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return its first bytes; it grows if it has to."""
        if nbytes > len(self._memory):
            self._memory = self._allocated(nbytes)
        return self._memory[:nbytes]

    @torch.inference_mode(False)  # written from either mode
    def _allocated(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def finish(self) -> None:
        """Wait for the copy, and bring what it stored to where it belongs."""
        self.used.synchronize()
        for target, source in zip(*self.pending, strict=True):
            target.copy_(source)
        self.pending = ((), ())


class _Copy(NamedTuple):
    """A copy that reads numbers `start` to `end - 1` of the ring until `done` is reached."""

    start: int
    end: int
    done: Event


class PinnedUploads:
    """A ring of pinned memory for row numbers and addresses on their way to one device.

    A copy from pageable memory waits for all of the stream, and pinning memory anew may wait for
    the device.

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
