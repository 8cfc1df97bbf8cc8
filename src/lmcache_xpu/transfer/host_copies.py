"""Copies between LMCache's host memory and the device memory that they are staged in.

A device copies by itself only from and to pinned memory. Where LMCache did not pin its pool (see
`pool_memory`) it is pinned here, if the driver allows that. If not, copies go through a small ring
of pinned memory, and the calling thread moves the bytes between that and LMCache's memory.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer.devices import Event, is_host, register_host
from lmcache_xpu.transfer.plan import HostMemory
from lmcache_xpu.transfer.tuning import tuning_of

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SMALLEST_STAGING_BYTES = 2 * 2**20
_ALIGNMENT = 256  # bytes, as PyTorch aligns what it allocates on devices


class Pinning(enum.IntEnum):
    """How an allocation of host memory is pinned."""

    NONE = 0
    REGISTERED = 1  # after it was allocated
    ALLOCATED = 2  # from the beginning


class HostCopies:
    """Copies between a device and host memory; looks up once how each allocation is pinned.

    Args:
        device: that copies.
        ring_bytes: pinned memory of each of the ring's two steps, allocated at the first need.
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
        self._ring_bytes = ring_bytes
        self._ring: list[_Step] = []
        self._turn = 0
        self._pinning: dict[tuple[int, int], Pinning] = {}
        # Addresses of the allocation that was looked up last, and how it is pinned.
        self._last, self._last_pinning = range(0), Pinning.NONE

    def pinned(self, memory: HostMemory, at_least: Pinning = Pinning.REGISTERED) -> bool:
        """Whether all of this memory is pinned at least so.

        Pins a pool that is not, which takes seconds for GiB.
        """
        if memory and self._pinning_of(memory[0]) and all(at in self._last for at in memory.reach):
            return self._last_pinning >= at_least  # a pool is one allocation
        return all(self._pinning_of(part) >= at_least for part in memory)

    def forget(self, memory: torch.Tensor) -> None:
        """Forget an allocation that is about to go; another one may get its addresses."""
        storage = memory.untyped_storage()
        self._pinning.pop((storage.data_ptr(), storage.nbytes()), None)
        self._last, self._last_pinning = range(0), Pinning.NONE

    def load(self, target: torch.Tensor, parts: Sequence[torch.Tensor], *, pinned: bool) -> None:
        """Enqueue copies from the host; `parts` may be reused when the current stream is done.

        Args:
            target: bytes on the device for all parts, one after another.
            parts: bytes of the host, flat.
            pinned: what `pinned` said of them. If not, this waits for the copy before the last.
        """
        if pinned:
            torch._foreach_copy_(_split(target, parts), list(parts), non_blocking=True)
            return
        step = self._next_step()
        staged = step.memory(target.numel())
        torch._foreach_copy_(_split(staged, parts), list(parts))
        target.copy_(staged, non_blocking=True)
        step.used.record()

    def store(self, parts: Sequence[torch.Tensor], source: torch.Tensor, *, pinned: bool) -> None:
        """Enqueue copies to the host; complete after `flush` when the current stream is done.

        Arguments as for `load`, in the other direction.
        """
        if pinned:
            torch._foreach_copy_(list(parts), _split(source, parts), non_blocking=True)
            return
        step = self._next_step()
        staged = step.memory(source.numel())
        staged.copy_(source, non_blocking=True)
        step.used.record()
        step.pending = parts, _split(staged, parts)

    def flush(self) -> None:
        """Finish stores to memory that is not pinned; waits for them."""
        for offset in range(1, len(self._ring) + 1):  # the older one first
            self._ring[(self._turn + offset) % len(self._ring)].finish()

    def _next_step(self) -> _Step:
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


def _split(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory as views of the sizes of these parts, one after another."""
    return list(memory.split_with_sizes([part.numel() for part in parts]))


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
        """Wait for the copy, and move what it stored to LMCache's memory."""
        self.used.synchronize()
        for target, source in zip(*self.pending, strict=True):
            target.copy_(source)
        self.pending = ((), ())


class Buffer(NamedTuple):
    """Bytes on the device for one piece; `filled` and `free` order the two streams."""

    memory: torch.Tensor
    start: int  # in the ring
    filled: Event
    free: Event


class StagingRing:
    """Device memory of which each piece takes as much as it needs, in turn.

    Args:
        buffer_bytes: of the largest piece.
        count: of pieces of that size that fit at once. At least two, so that one is copied while
            another is gathered or scattered; 0 where nothing is staged.
        device: of the memory, which is allocated here.
    """

    def __init__(self, buffer_bytes: int, count: int, device: torch.device) -> None:
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._memory = torch.empty(count * _aligned(buffer_bytes), dtype=torch.uint8, device=device)
        self._used: deque[Buffer] = deque()  # the oldest first
        self._next = 0

    @classmethod
    def allocate(cls, staging_bytes: int | None, device: torch.device) -> Self:
        """Allocate `staging_bytes`, or what the device is tuned for.

        Where there is not enough memory, half of it is tried, and so on.

        Raises:
            SettingsError: not even the least can be allocated.
        """
        tuning = tuning_of(device.type)
        size = requested = tuning.staging_bytes if staging_bytes is None else staging_bytes
        while size >= SMALLEST_STAGING_BYTES:
            buffer_bytes = min(size // 2, tuning.buffer_bytes)
            try:
                ring = cls(buffer_bytes, size // buffer_bytes, device)
            except torch.OutOfMemoryError:
                size //= 2
                continue
            if size < requested:
                logger.warning(
                    "staging uses %.0f MiB of %s, not %.0f: there is not more free memory "
                    "(docs: troubleshooting#staging-smaller)",
                    *(size / 2**20, device, requested / 2**20),
                )
            return ring
        raise SettingsError(
            f"no {SMALLEST_STAGING_BYTES >> 20} MiB of free memory on {device} to stage copies in",
            f"{requested >> 20} MiB (staging_mib)",
            "Lower memory_fraction, so that the engine leaves some.",
        )

    def take(self, nbytes: int) -> Buffer:
        """Return memory for a piece of up to `buffer_bytes`, the one that was used longest ago.

        The current stream waits for its users.
        """
        size = _aligned(max(1, nbytes))  # each has a place of its own
        start = self._next
        if start + size > len(self._memory):
            self._reclaim(start, len(self._memory))  # the end is left out
            start = 0
        self._next = start + size
        self._reclaim(start, self._next)
        memory = self._memory[start : start + nbytes]
        self._used.append(Buffer(memory, start, Event(self._device), Event(self._device)))
        return self._used[-1]

    def _reclaim(self, start: int, end: int) -> None:
        """Let the current stream wait for the users of a part of the ring, the oldest of all."""
        while self._used and start <= self._used[0].start < end:
            self._used.popleft().free.wait()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
