"""The files of a chunk store: their names, and one process at a time among them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from typing import TYPE_CHECKING

from lmcache_xpu.tiers.disk.chunk_file import scan_chunk
from lmcache_xpu.tiers.disk.lock import DirectoryLock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo

__all__ = ["ChunkDirectory"]

_SUFFIX = ".lmxkv"
_TEMPORARY = ".lmxkv.tmp"


class ChunkDirectory:
    """A directory that holds one file for each chunk, named by the hash of the chunk's key.

    Files of other names are left alone. Not thread-safe.

    Args:
        path: the directory; made by `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: DirectoryLock | None = None
        self._serial = itertools.count()

    def open(self, lock_seconds: float) -> None:
        """Make the directory, mode 0700, where it is missing, and keep other processes out.

        Args:
            lock_seconds: how long to wait for another process to let go of it.

        Raises:
            SettingsError: another process uses it.
            OSError: it can't be made, or is another user's.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self._lock = DirectoryLock(self.path, lock_seconds)

    def release(self) -> None:
        """Let other processes in; may be called twice."""
        if self._lock is not None:
            self._lock.release()

    def file(self, key: str) -> Path:
        """Where the chunk of this key is, or would be."""
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"

    def temporary(self) -> Path:
        """A new name for a file that is being written; `scan` removes it after a crash."""
        return self.path / f"{next(self._serial)}{_TEMPORARY}"

    def scan(self) -> Iterator[tuple[str, ChunkInfo, int] | None]:
        """Yield each chunk of earlier runs as `scan_chunk` reads it; None for a damaged file.

        Removes damaged files, and those that were not written to their end.
        """
        for file in self.path.iterdir():
            damaged = False
            if file.name.endswith(_SUFFIX):
                chunk = self._intact(file)
                damaged = chunk is None
                yield chunk
            if damaged or file.name.endswith(_TEMPORARY):
                with contextlib.suppress(OSError):  # e.g. a directory of that name
                    file.unlink()

    def mark(self, key: str, used_ns: int) -> None:
        """Keep a chunk's time of last use over a restart."""
        with contextlib.suppress(OSError):  # removed by hand: there is nothing to keep
            os.utime(self.file(key), ns=(used_ns, used_ns))

    def remove(self, key: str) -> None:
        """Remove a chunk's file, if it is there."""
        with contextlib.suppress(OSError):  # gone already, or not ours to remove any more
            self.file(key).unlink()

    def _intact(self, file: Path) -> tuple[str, ChunkInfo, int] | None:
        try:
            chunk = scan_chunk(file)
        except OSError:
            return None
        return chunk if chunk and file.name == self.file(chunk[0]).name else None
