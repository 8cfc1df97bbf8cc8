"""The files of a chunk store: their names, and one process at a time among them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, scan_chunk
from lmcache_xpu.tiers.disk.lock import DirectoryLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo

__all__ = ["ChunkDirectory"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

_SUFFIX = ".lmxkv"
_TEMPORARY = ".lmxkv.tmp"


class ChunkDirectory:
    """A directory that holds one file for each chunk, named by the hash of the chunk's key.

    Files of other names are left alone. Not thread-safe.

    Args:
        path: the directory; made by `open`.
        left: directories whose ranks are no more; their files come here with `open`.

    Attributes:
        unreadable: payloads' sizes, by name, of the files that the last `scan` could not read.
            They stay: a later start may read them.
    """

    def __init__(self, path: Path, left: Sequence[Path] = ()) -> None:
        self.path = path
        self._left = left
        self._lock: DirectoryLock | None = None
        self._serial = itertools.count()
        self.unreadable: dict[str, int] = {}

    def open(self, lock_seconds: float) -> None:
        """Make the directory, mode 0700, where it is missing, and keep other processes out.

        Args:
            lock_seconds: how long to wait for another process to let go of it.

        Raises:
            SettingsError: another process uses it, or it is a link or another user's. What was
                held before is still held then.
            OSError: it can't be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = DirectoryLock(self.path, lock_seconds)
        self.release()
        self._lock = lock
        for left in self._left:
            try:
                self._adopt(left)
            except (SettingsError, OSError) as error:
                logger.warning(
                    "disk tier: left as it is: %s (docs: troubleshooting#disk-left)", error
                )

    def release(self) -> None:
        """Let other processes in; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def is_in_place(self) -> bool:
        """Whether the directory that is held is still where it was."""
        return self._lock is not None and self._lock.is_in_place()

    def file(self, key: str) -> Path:
        """Where the chunk of this key is, or would be. A file that can't be read has its name."""
        name = f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"
        return self.at(key if key in self.unreadable else name)

    def at(self, name: str) -> Path:
        """Where the file of this name is, or would be."""
        return (self.path if self._lock is None else self._lock.held) / name

    def temporary(self) -> str:
        """A new name for a file that is being written; `scan` removes it after a crash."""
        return f"{next(self._serial)}{_TEMPORARY}"

    def publish(self, temporary: str, key: str) -> str:
        """Give a complete file the name of its chunk, and return that."""
        name = self.at(temporary).rename(self.file(key)).name
        self.unreadable.pop(name, None)
        return name

    def scan(self) -> Iterator[tuple[str, ChunkInfo, int] | None]:
        """Yield each chunk of earlier runs as `scan_chunk` reads it; None for a damaged file.

        Removes damaged files, and those that were not written to their end.
        """
        self.unreadable.clear()
        for file in self.at("").iterdir():
            damaged = False
            if file.name.endswith(_SUFFIX):
                try:
                    chunk = self._intact(file)
                except OSError:
                    with contextlib.suppress(FileNotFoundError):
                        self.unreadable[file.name] = max(0, file.lstat().st_size - HEADER_BYTES)
                    continue
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
        """Remove a chunk's file, if it is there.

        Raises:
            OSError: it is still there.
        """
        self.discard(self.file(key).name)
        self.unreadable.pop(key, None)

    def discard(self, name: str) -> None:
        """Remove the file of this name, if it is there, and the directory is.

        Raises:
            OSError: it is still there.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.at(name).unlink()

    def _adopt(self, left: Path) -> None:
        """Move the files of a directory here; those of another disk are removed.

        Raises:
            SettingsError: another process uses it, or it is a link or another user's.
            OSError: it is not a directory, or a file can't be moved; it and others stay there.
        """
        lock = DirectoryLock(left, wait_seconds=0)
        try:
            for file in lock.held.iterdir():
                if not file.name.endswith((_SUFFIX, _TEMPORARY)):
                    continue
                try:
                    file.rename(self.at(file.name))
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    file.unlink()
        finally:
            lock.release()

    def _intact(self, file: Path) -> tuple[str, ChunkInfo, int] | None:
        chunk = scan_chunk(file)
        return chunk if chunk and file.name == self.file(chunk[0]).name else None
