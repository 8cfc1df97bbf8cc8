"""Memory that LMCache's server lends to workers of its host, mapped and pinned in this process."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import torch

from lmcache_xpu.errors import HostMemoryError, SettingsError
from lmcache_xpu.transfer.devices import is_host, register_host, unregister_host

__all__ = ["LentMemory"]

DIRECTORY = Path("/dev/shm")


class LentMemory:
    """The server's pool, as flat bytes.

    It stays mapped after its server ended, with its bytes, until the last tensor of it goes.

    Args:
        name: of the segment of shared memory.
        size: bytes.
        device: that copies from and to it; pinning for it takes seconds for GiB.

    Raises:
        SettingsError: there is no such segment here, or others can open it too.
    """

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self._device, self._name = device, name
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
            self._identity = (status.st_dev, status.st_ino)
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._pool = torch.frombuffer(mapped, dtype=torch.uint8)
        address = self._pool.data_ptr()
        self.pinned = not is_host(device) and register_host(address, size, device)

    @property
    def pool(self) -> torch.Tensor:
        """All of it."""
        return self._pool

    @property
    def is_gone(self) -> bool:
        """Whether nobody can open it any more: its server ended, and its name was taken away."""
        return not self.is_at(self._name, len(self._pool))

    def is_at(self, name: str, size: int) -> bool:
        """Whether a segment of this name and size is this one, not one that came after it."""
        try:
            status = _path(name).stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity and size == len(self._pool)

    def slot(self, offset: int, length: int, expected: int) -> torch.Tensor:
        """Return an object's bytes.

        Raises:
            HostMemoryError: it is no part of the pool, or not as large as expected.
        """
        if not 0 <= offset <= offset + length <= len(self._pool) or length != expected:
            raise HostMemoryError(
                f"an object of {length} bytes at {offset}",
                f"{expected} bytes within the {len(self._pool)} that the server lends",
            )
        return self._pool[offset : offset + length]

    def release(self) -> None:
        """Give the pinning back, once nothing copies any more; may be called again."""
        if self.pinned:
            self.pinned = False
            unregister_host(self._pool.data_ptr(), self._device)


def _path(name: str) -> Path:
    bare = name.lstrip("/")
    if not bare or "/" in bare:
        raise SettingsError(f"shared memory named {name!r}", "a name without slashes")
    return DIRECTORY / bare
