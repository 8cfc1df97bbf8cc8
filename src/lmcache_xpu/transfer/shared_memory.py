"""Memory that processes of one host map together, and that has no name.

It goes when the last of them has ended, however that was. A process opens it through the one that
made it, in `/proc`: not by a name in `/dev/shm`, whose files outlive a kill and whose size
containers keep small.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

if TYPE_CHECKING:  # who only starts an engine imports this module, too
    import torch


class Place(NamedTuple):
    """Where another process finds shared memory."""

    process: int
    descriptor: int
    inode: int
    size: int


class SharedMemory:
    """Memory that this process has mapped, until it ends: a driver may know it.

    Args:
        descriptor: of an open file in memory; the object's from now on.
        size: bytes of it.

    Attributes:
        address: of its first byte.
    """

    _made: ClassVar[dict[int, SharedMemory]] = {}  # by address

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @cached_property
    def tensor(self) -> torch.Tensor:
        """All of it, `[size]` uint8."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def make(cls, size: int) -> Self:
        """Return new memory, zero and resident.

        Raises:
            OSError: there is not so much memory.
        """
        descriptor = os.memfd_create("lmcache-xpu", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        cls._made[memory.address] = memory
        return memory

    @classmethod
    def made_at(cls, address: int) -> SharedMemory | None:
        """Return the memory that this process has made at an address."""
        return cls._made.get(address)

    def number(self, offset: int) -> ctypes.c_int64:
        """Return a number in it, which is read and written at once; it keeps the memory mapped.

        Args:
            offset: in bytes, a multiple of eight.
        """
        return ctypes.c_int64.from_buffer(self._map, offset)

    @property
    def place(self) -> Place:
        """Where others find it, while this process lives."""
        inode = os.fstat(self._descriptor).st_ino
        return Place(os.getpid(), self._descriptor, inode, self._size)

    @classmethod
    def open(cls, place: Place) -> Self:
        """Map what another process has made.

        Raises:
            OSError: that process has ended, or this one may not look into it.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        descriptor = os.open(f"/proc/{place.process}/fd/{place.descriptor}", flags)
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size) != (place.inode, place.size):
            os.close(descriptor)
            raise OSError("another file has the number of the shared memory")
        return cls(descriptor, place.size)
