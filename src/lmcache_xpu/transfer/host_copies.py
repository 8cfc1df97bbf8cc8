"""Copies between LMCache's host memory and the device memory that they are staged in.

A device copies by itself only from and to pinned memory. Where LMCache did not pin its pool (see
`pool_memory`) it is pinned here, if the driver allows that. If not, copies go through other pinned
memory, and the calling thread moves the bytes between that and LMCache's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer.devices import Event, Pinning, event_at, is_host, logger, register_host
from lmcache_xpu.transfer.plan import HostMemory
from lmcache_xpu.transfer.tuning import TUNING

# Whether memory that a cache lends is pinned, by its address: who lends it pins it, and says so.
LENT: dict[int, bool] = {}
SMALLEST_STAGING_BYTES = 2 * 2**20
_ALIGNMENT = 256  # bytes, as PyTorch aligns what it allocates on devices


class HostCopies:
    """Copies between a device and host memory; looks up once how each allocation is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinning: dict[tuple[int, int], Pinning] = {}
        self._passing: deque[Event] = deque()  # copies from memory that is not pinned

    def pinned(self, memory: HostMemory, at_least: Pinning = Pinning.REGISTERED) -> bool:
        """Whether all of this memory is pinned so. Pins a pool that is not: seconds for GiB."""
        if memory.pinning is None:
            storages = list(map(torch.Tensor.untyped_storage, memory))
            parts = {
                (storage.data_ptr(), storage.nbytes()): part
                for part, storage in zip(memory, storages, strict=True)
            }
            pinnings = (self._pinning_of(part, *place) for place, part in parts.items())
            memory.pinning = min(pinnings, default=Pinning.ALLOCATED)
        return memory.pinning >= at_least

    def load(self, target: torch.Tensor, parts: Sequence[torch.Tensor], *, pinned: bool) -> None:
        """Enqueue copies from parts of the host, flat bytes, one after another into `target`.

        They may be reused when the current stream is done. If they are not `pinned`, this waits for
        the copy before the last.
        """
        if pinned:
            torch._foreach_copy_(_split(target, parts), list(parts), non_blocking=True)
            return
        if len(self._passing) > 1:
            self._passing.popleft().synchronize()
        passing = self._pinned_as(target)  # PyTorch keeps it until its copy is done
        torch._foreach_copy_(_split(passing, parts), list(parts))
        target.copy_(passing, non_blocking=True)
        self._passing.append(event_at(self._device))

    def store(self, parts: Sequence[torch.Tensor], source: torch.Tensor, *, pinned: bool) -> None:
        """Do as `load` in the other direction; waits for the copies if not `pinned`."""
        if pinned:
            torch._foreach_copy_(list(parts), _split(source, parts), non_blocking=True)
            return
        passing = self._pinned_as(source)
        passing.copy_(source, non_blocking=True)
        event_at(self._device).synchronize()
        torch._foreach_copy_(list(parts), _split(passing, parts))

    def _pinned_as(self, memory: torch.Tensor) -> torch.Tensor:
        pin = not is_host(self._device)
        return torch.empty(memory.shape, dtype=memory.dtype, pin_memory=pin)

    def _pinning_of(self, part: torch.Tensor, address: int, size: int) -> Pinning:
        if address in LENT and not part.is_pinned():
            return Pinning.REGISTERED if LENT[address] else Pinning.NONE
        if (address, size) not in self._pinning:
            self._pinning[address, size] = self._pin(part, address, size)
        return self._pinning[address, size]

    def _pin(self, part: torch.Tensor, address: int, size: int) -> Pinning:
        if part.is_pinned():
            return Pinning.ALLOCATED
        if size < TUNING.pool_bytes:
            return Pinning.NONE
        registered = register_host(address, size, self._device)
        logger.info(
            "host memory of %.1f GiB was not pinned; %s (docs: troubleshooting#not-pinned)",
            size / 2**30,
            f"it is now, for {self._device}"
            if registered
            else f"{self._device} can't pin it, so copies go through other pinned memory",
        )
        return Pinning.REGISTERED if registered else Pinning.NONE


def _split(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory as views of the sizes of these parts, one after another."""
    return list(memory.split_with_sizes([part.numel() for part in parts]))


class Buffer(NamedTuple):
    """Bytes on the device for one piece; `filled` and `free` order the two streams."""

    memory: torch.Tensor
    start: int  # in the ring
    filled: Event
    free: Event


class StagingRing:
    """Device memory, allocated here, of which each piece takes as much as it needs.

    It has room for `count` pieces of `buffer_bytes`, the largest: for at least two, so that one is
    copied while another is gathered or scattered; for none where nothing is staged.
    """

    def __init__(self, buffer_bytes: int, count: int, device: torch.device) -> None:
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._memory = torch.empty(count * _aligned(buffer_bytes), dtype=torch.uint8, device=device)
        self._used: deque[Buffer] = deque()  # the oldest first
        self._next = 0

    @classmethod
    def allocate(cls, staging_bytes: int | None, device: torch.device) -> Self:
        """Allocate `staging_bytes`, or `Tuning.staging_bytes`.

        Where there is not enough memory, half of it is tried, and so on.

        Raises:
            SettingsError: not even the least can be allocated.
        """
        size = requested = TUNING.staging_bytes if staging_bytes is None else staging_bytes
        while size >= SMALLEST_STAGING_BYTES:
            buffer_bytes = min(size // 2, TUNING.buffer_bytes)
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
        """Return the memory that was used longest ago; the current stream waits for its users."""
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
