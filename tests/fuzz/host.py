"""Host memory as LMCache hands it out: objects on one arena, all of it watched."""

from __future__ import annotations

import random

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

ALIGNMENT = 16


class Object(TensorMemoryObj):
    """LMCache's, without its safety net: a reference that is lost stays lost."""

    def __del__(self) -> None:
        """Nothing."""


class Arena:
    """Places for objects of at most `size` bytes; what is given up is overwritten at once.

    `wanted` is what all of it must hold.
    """

    def __init__(self, places: int, size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._size = -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT  # with room to spare
        self.raw = torch.frombuffer(
            bytearray(self._random.randbytes(places * self._size)), dtype=torch.uint8
        )
        self.wanted = bytearray(self.bytes())
        self._free = list(range(places))
        self.lent = 0

    def bytes(self) -> bytes:
        return self.raw.numpy().tobytes()

    @property
    def room(self) -> int:
        return len(self._free)

    def allocate(self, shape: torch.Size, dtype: torch.dtype, fmt: MemoryFormat) -> TensorMemoryObj:
        """An object with one reference, and a few bytes more than it needs."""
        place = self._free.pop(self._random.randrange(len(self._free)))
        size = shape.numel() * dtype.itemsize
        spare = self._random.choice((0, 0, dtype.itemsize))
        at = place * self._size
        assert size + spare <= self._size
        meta = MemoryObjMetadata(shape, dtype, at, self._size, 1, fmt=fmt)
        self.lent += 1
        return Object(self.raw[at : at + size + spare], meta, self)

    def free(self, obj: TensorMemoryObj) -> None:
        """LMCache's objects call this when their last reference goes."""
        if not obj.is_valid():
            return
        obj.invalidate()
        at = obj.meta.address  # its lock is held
        noise = self._random.randbytes(self._size)
        self.wanted[at : at + self._size] = noise
        self.raw[at : at + self._size] = torch.frombuffer(bytearray(noise), dtype=torch.uint8)
        self._free.append(at // self._size)
        self.lent -= 1
