"""What happens before what beside a device: two accesses that nothing orders are a race.

Everything here runs at once and in one thread. But each access is noted with the clock of whoever
makes it, the host or a stream, and clocks grow only by what really orders: a launch behind what the
host has done, an event that is waited for. So a missing wait is seen, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

Where = slice | np.ndarray  # bytes of an allocation


class Actor:
    """The host or a stream, whose own accesses are in order."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.clock: dict[int, int] = {number: 1}

    def after(self, clock: dict[int, int]) -> None:
        """Order what follows after what had happened by a clock."""
        for number, time in clock.items():
            self.clock[number] = max(time, self.clock.get(number, 0))

    def step(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]


class Allocation:
    """Some memory: of each byte, who wrote it last and when, and when each actor read it.

    The storage is kept, so that its addresses are not given to another.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.start, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self._storage = storage
        self._writer = np.zeros(storage.nbytes(), np.int8)
        self._written = np.zeros(storage.nbytes(), np.int32)
        self._read: dict[int, np.ndarray] = {}

    def access(self, actor: Actor, where: Where, *, write: bool) -> int | None:
        """Note an access; the number of the actor with which it is in a race."""
        race = self._race(actor, where, write=write)
        time = actor.step()
        if write:
            self._writer[where], self._written[where] = actor.number, time
        else:
            if actor.number not in self._read:
                self._read[actor.number] = np.zeros(len(self._written), np.int32)
            self._read[actor.number][where] = time
        return race

    def _race(self, actor: Actor, where: Where, *, write: bool) -> int | None:
        writers, written = self._writer[where], self._written[where]
        for number in np.unique(writers[written > 0]):
            if written[writers == number].max() > actor.clock.get(int(number), 0):
                return int(number)
        for number, times in self._read.items() if write else ():
            if number != actor.number and times[where].max(initial=0) > actor.clock.get(number, 0):
                return number
        return None


class Memory:
    """All allocations that a device has to do with."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}
        self._starts = np.empty(0, np.uint64)

    def add(self, tensor: torch.Tensor) -> None:
        """Note what happens in a tensor's memory from now on."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._allocations:
            self._allocations[storage.data_ptr()] = Allocation(storage)
            self._starts = np.array(sorted(self._allocations), np.uint64)

    def of(self, tensor: torch.Tensor) -> Allocation | None:
        return self._allocations.get(tensor.untyped_storage().data_ptr())

    def places(
        self, addresses: np.ndarray, size: int
    ) -> Iterable[tuple[Allocation | None, np.ndarray]]:
        """Bytes of words of some size at addresses, by allocation; None for those outside."""
        if not len(self._starts):
            yield None, addresses
            return
        at = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        for number in np.unique(at):
            mine = addresses[at == number]
            if number < 0:
                yield None, mine
                continue
            allocation = self._allocations[int(self._starts[number])]
            if int(mine.max()) + size > allocation.end:
                yield None, mine
                continue
            begins = (mine - np.uint64(allocation.start)).astype(np.int64)
            yield allocation, (begins[:, None] + np.arange(size)).reshape(-1)


def bytes_of(tensor: torch.Tensor) -> Where:
    """A tensor's, in its allocation."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return slice(first, first + tensor.numel() * size)
    where = first + np.arange(size)
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        where = where[..., None] + np.arange(extent) * stride * size
    return where.reshape(-1)
