"""Copies between the device and LMCache's host memory, pinned or not.

A device copies by itself only from and to pinned memory. LMCache pins its memory where it can. If
it did not, because it could not or should not (see `pinned`), its pool is pinned here, where the
device's driver allows that; if not even that works, copies go by way of a small ring of pinned
memory, and the calling thread moves the bytes between that and LMCache's memory.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence

import torch

from lmcache_xpu.transfer.addresses import address_table
from lmcache_xpu.transfer.devices import (
    Event,
    batched_copy,
    is_host,
    kernels_reach_registered,
    register_host,
)
from lmcache_xpu.transfer.segments import Slices

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# What is pinned here stays pinned until the process ends. That is right for a pool, and wrong for
# passing memory, whose addresses are given to others.
POOL_BYTES = 64 * 2**20


class Reach(enum.IntEnum):
    """What of a device reaches an allocation by itself."""

    NOTHING = 0
    COPIES = 1
    KERNELS = 2  # copies as well


class HostMemory:
    """What a device can reach of the host's memory; asked once per allocation.

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
        self._reach: dict[tuple[int, int], Reach] = {}
        # Addresses of the allocation that was asked for last, and what reaches it.
        self._last, self._last_reach = range(0), Reach.NOTHING

    def pinned(self, memory: Sequence[torch.Tensor]) -> bool:
        """Whether the device copies from and to all of this memory by itself."""
        return all(self._reach_of(part) >= Reach.COPIES for part in memory)

    def kernels_reach(self, memory: Sequence[torch.Tensor]) -> bool:
        """Whether kernels may address all of this memory, on a device where they may any."""
        return all(self._reach_of(part) >= Reach.KERNELS for part in memory)

    @property
    def copies_in_batches(self) -> bool:
        """Whether many small copies are about as fast as few large ones."""
        return self._batched is not None

    def load(self, target: torch.Tensor, source: Slices, *, pinned: bool) -> None:
        """Enqueue copies from the host; `source` may be reused when the current stream is done.

        Args:
            target: bytes on the device for all slices.
            source: `pinned` memory or not.
            pinned: what `pinned` said of it. If not, this waits for the copy before the last.
        """
        if not pinned:
            step = self._next()
            staged = step.memory(source.nbytes)
            torch._foreach_copy_(source.split(staged), source.tensors())
            target.copy_(staged, non_blocking=True)
            step.used.record()
        elif self._batched is not None and len(source) > 1:
            self._enqueue(source.addresses(), source.staged_addresses(target), source.sizes)
        else:
            torch._foreach_copy_(source.split(target), source.tensors(), non_blocking=True)

    def store(self, target: Slices, source: torch.Tensor, *, pinned: bool) -> None:
        """Enqueue copies to the host; complete after `flush` when the current stream is done.

        Arguments as for `load`, the other way.
        """
        if not pinned:
            step = self._next()
            staged = step.memory(target.nbytes)
            staged.copy_(source, non_blocking=True)
            step.used.record()
            step.pending = target.tensors(), target.split(staged)
        elif self._batched is not None and len(target) > 1:
            self._enqueue(target.staged_addresses(source), target.addresses(), target.sizes)
        else:
            torch._foreach_copy_(target.tensors(), target.split(source), non_blocking=True)

    def flush(self) -> None:
        """Finish stores to memory that is not pinned; waits for them."""
        for offset in range(1, len(self._ring) + 1):  # the older one first
            self._ring[(self._turn + offset) % len(self._ring)].finish()

    def _enqueue(self, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        assert self._batched is not None
        copies = address_table([*sources, *targets, *sizes]).view(3, -1)
        self._batched(*(copies if all(sizes) else copies[:, copies[2] > 0]))

    def _next(self) -> _Step:
        if not self._ring:
            self._ring = [_Step(self._device, self._ring_bytes) for _ in range(2)]
        self._turn = (self._turn + 1) % len(self._ring)
        step = self._ring[self._turn]
        step.finish()
        return step

    def _reach_of(self, part: torch.Tensor) -> Reach:
        if part.data_ptr() in self._last:  # a pool is one allocation, and each part asks for it
            return self._last_reach
        storage = part.untyped_storage()
        allocation = (storage.data_ptr(), storage.nbytes())
        reach = self._reach.get(allocation)
        if reach is None:
            reach = self._reach[allocation] = self._ask(part, *allocation)
        if reach:
            self._last, self._last_reach = range(allocation[0], sum(allocation)), reach
        return reach

    def _ask(self, part: torch.Tensor, address: int, size: int) -> Reach:
        if part.is_pinned():
            return Reach.KERNELS
        if size < POOL_BYTES:
            return Reach.NOTHING
        registered = self._register(address, size, self._device)
        logger.info(
            "host memory of %.1f GiB was not pinned; %s",
            size / 2**30,
            f"it is now, for {self._device}"
            if registered
            else f"{self._device} can't pin it, so copies go through a ring of pinned memory",
        )
        if not registered:
            return Reach.NOTHING
        return Reach.KERNELS if kernels_reach_registered(self._device) else Reach.COPIES


class _Step:
    """Pinned memory for one copy at a time."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.used = Event(device)
        self.pending: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())
        self._pin = not is_host(device)
        self._memory = self._allocated(size)

    def memory(self, nbytes: int) -> torch.Tensor:
        """So many bytes of it; it grows if it has to."""
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
