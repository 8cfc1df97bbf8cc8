"""Memory that LMCache's server lends to workers of its host, mapped and pinned in this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from pathlib import Path
from typing import Self

import torch

from lmcache_xpu.errors import HostMemoryError, SettingsError
from lmcache_xpu.transfer.devices import is_host, register_host, unregister_host

__all__ = ["LentMemory"]

DIRECTORY = Path("/dev/shm")


class LentMemory:
    """The pool of a cache, as flat bytes.

    A server's stays mapped after that ended, with its bytes, until the last tensor of it goes.

    Args:
        pool: all of it.
        device: that copies from and to it; pinning for it takes seconds for GiB.
        is_pinned: it is pinned already, and others release it.
        file: of a server's, its path and what identifies the file.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        device: torch.device,
        *,
        is_pinned: bool = False,
        file: tuple[Path, tuple[int, int]] | None = None,
    ) -> None:
        self.pool = pool
        self._device, self._file = device, file
        address, size = pool.data_ptr(), len(pool)
        self._pins = not (is_pinned or is_host(device)) and register_host(address, size, device)
        self.pinned = is_pinned or self._pins

    @classmethod
    def at(cls, address: int, size: int, device: torch.device, *, is_pinned: bool) -> Self:
        """Return the memory of a cache in this process, which outlives it."""
        memory = (ctypes.c_uint8 * size).from_address(address)
        return cls(torch.frombuffer(memory, dtype=torch.uint8), device, is_pinned=is_pinned)

    @classmethod
    def of_server(cls, name: str, size: int, device: torch.device) -> Self:
        """Map the memory of a server.

        Args:
            name: of the segment of shared memory.
            size: bytes.
            device: that copies from and to it.

        Raises:
            SettingsError: there is no such segment here, or others can open it too.
        """
        try:
            descriptor = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise SettingsError(
                f"a server whose shared memory {name!r} can't be opened here ({error.strerror})",
                "a server on this host, of this user, with the same /dev/shm",
                "In containers share the host's IPC namespace, or one volume at /dev/shm.",
            ) from error
        try:
            status = os.fstat(descriptor)
            # All prompts go there: it must not be a segment that somebody else has made.
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise SettingsError(
                    f"shared memory {name!r} of user {status.st_uid} with mode "
                    f"{stat.filemode(status.st_mode)}",
                    f"memory of user {os.geteuid()} alone",
                    "Run server and engine as one user.",
                )
            if status.st_size < size or not size:
                raise SettingsError(
                    f"shared memory {name!r} of {status.st_size} bytes", f"{size} or more"
                )
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        file = _path(name), (status.st_dev, status.st_ino)
        return cls(torch.frombuffer(mapped, dtype=torch.uint8), device, file=file)

    @property
    def is_gone(self) -> bool:
        """Whether nobody can open it any more: its server ended, and its name was taken away."""
        return self._file is not None and not self._is_file(self._file[0])

    def is_at(self, name: str, size: int) -> bool:
        """Whether a segment of this name and size is this one, not one that came after it."""
        return size == len(self.pool) and self._is_file(_path(name))

    def _is_file(self, path: Path) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        return self._file is not None and self._file[1] == (status.st_dev, status.st_ino)

    def slot(self, offset: int, length: int, expected: int) -> torch.Tensor:
        """Return an object's bytes.

        Raises:
            HostMemoryError: it is no part of the pool, or not as large as expected.
        """
        if not 0 <= offset <= offset + length <= len(self.pool) or length != expected:
            raise HostMemoryError(
                f"an object of {length} bytes at {offset}",
                f"{expected} bytes within the {len(self.pool)} that the server lends",
            )
        return self.pool[offset : offset + length]

    def release(self) -> None:
        """Give the pinning back, once nothing copies any more; may be called again."""
        if self._pins:
            self._pins = self.pinned = False
            unregister_host(self.pool.data_ptr(), self._device)


def _path(name: str) -> Path:
    bare = name.lstrip("/")
    if not bare or "/" in bare:
        raise SettingsError(f"shared memory named {name!r}", "a name without slashes")
    return DIRECTORY / bare
