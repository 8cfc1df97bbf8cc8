"""The files of a chunk store and their index, for one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_USED_BYTES
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, ChunkInfo, disk_bytes, scan_chunk
from lmcache_xpu.tiers.disk.lock import DirectoryLock
from lmcache_xpu.tiers.pause import Complaint

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

    from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex

__all__ = ["ChunkDirectory"]

_SUFFIX = ".lmxkv"
_TEMPORARY = ".lmxkv.tmp"
_TRIES = 8  # files that can't be removed, for one chunk, before it is dropped


class ChunkDirectory:
    """One file for each chunk, named by the hash of the chunk's key. Not thread-safe.

    Files of other names are left alone.

    Args:
        path: the directory; made by `open`.
        index: of the chunks; filled by `open`.
        count: of what happens, see `ChunkStore.counters`.
    """

    def __init__(self, path: Path, index: ChunkIndex, count: Counter[str]) -> None:
        self._path = path
        self._index = index
        self._count = count
        self._lock: DirectoryLock | None = None
        self._serial = itertools.count()
        # Names of the files that the last `open` could not read. A later start may read them.
        self._unreadable: set[str] = set()
        self._stuck = Complaint(
            "a file can't be removed for others (%s) (docs: troubleshooting#disk-not-stored)"
        )

    def open(self, lock_seconds: float) -> None:
        """Keep other processes out, and build the index from the files' headers.

        Makes the directory, mode 0700, where it is missing. Removes damaged and incomplete files,
        and what exceeds the limit.

        Args:
            lock_seconds: how long to wait for another process to let go of the directory.

        Raises:
            SettingsError: another process uses it, or it is a link or another user's. A directory
                that was held before is still held then.
            OSError: it can't be made or read.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = DirectoryLock(self._path, lock_seconds)
        self.release()
        self._lock = lock
        self._scan()
        self.make_room(0, self._index.now())
        DISK_USED_BYTES.set(self._index.used_bytes)

    def reopen(self) -> None:
        """Make the directory again if someone has removed it. Raises OSError if that fails."""
        if self._lock is None or self._lock.is_in_place():
            return
        try:
            self.open(lock_seconds=0)
        except SettingsError as error:
            raise OSError(str(error)) from error

    def release(self) -> None:
        """Let other processes in; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def file(self, key: str) -> Path:
        """Where the chunk of this key is, or would be. A file that can't be read has its name."""
        name = f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"
        return self.at(key if key in self._unreadable else name)

    def at(self, name: str) -> Path:
        """Where the file of this name is, or would be."""
        return (self._path if self._lock is None else self._lock.held) / name

    def temporary(self) -> str:
        """A new name for a file that is being written; `open` removes it after a crash."""
        return f"{next(self._serial)}{_TEMPORARY}"

    def publish(self, temporary: str, key: str, info: ChunkInfo, used_ns: int) -> None:
        """Give a complete file the name of its chunk, and let it be found."""
        name = self.at(temporary).rename(self.file(key)).name
        self._unreadable.discard(name)
        self._index.remove(name)  # a file that could not be read had this name
        # At once, or another put would find it counted twice, and evict for it.
        self._index.reserve(-disk_bytes(info.payload_bytes))
        self._index.add(key, info, used_ns)
        DISK_USED_BYTES.set(self._index.used_bytes)

    def mark(self, key: str, used_ns: int) -> None:
        """Set a chunk's time of last use, if it is stored; kept over a restart."""
        if self._index.mark(key, used_ns):
            self._mark_file(key, used_ns)

    def remove(self, key: str) -> bool:
        """Remove a chunk; one whose file stays is hidden, keeps its room, and False is returned."""
        try:
            self._remove_file(key)
        except OSError:
            self._count["errors"] += 1
            self._index.hide(key)
            return False
        DISK_USED_BYTES.set(self._index.used_bytes)
        return True

    def remove_all(self, is_meant: Callable[[str], bool]) -> bool:
        """Remove chunks by their keys; False if a file could not be removed."""
        # Nobody knows whose a file is that could not be read.
        keys = [key for key in self._index if key in self._unreadable or is_meant(key)]
        failed = [key for key in keys if not self.remove(key)]
        return not failed

    def make_room(self, need_bytes: int, used_ns: int) -> bool:
        """Evict what was used before, until so much more fits.

        Returns False if it can't, or files can't be removed.
        """
        if not self._index.fits(need_bytes) and not self._index.can_fit(need_bytes):
            return False
        failed = 0
        for key in self._index.evict(need_bytes, used_ns):
            try:
                self._remove_file(key)
                self._count["evicted"] += 1
            except OSError as error:
                self._count["errors"] += 1
                self._stuck.log(error)
                self._index.mark(key, self._index.now())
                failed += 1
                if failed == _TRIES:
                    break
        return self._index.fits(need_bytes)

    def discard(self, name: str) -> None:
        """Remove the file of this name, if there is one. Raises OSError if it stays."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.at(name).unlink()

    def _mark_file(self, key: str, used_ns: int) -> None:
        with contextlib.suppress(OSError):  # removed by hand: there is nothing to keep
            os.utime(self.file(key), ns=(used_ns, used_ns))

    def _remove_file(self, key: str) -> None:
        self.discard(self.file(key).name)
        self._unreadable.discard(key)
        self._index.remove(key)

    def _scan(self) -> None:
        self._index.clear()
        self._unreadable.clear()
        chunks = []
        for file in self.at("").iterdir():
            if file.name.endswith(_SUFFIX):
                try:
                    chunk = scan_chunk(file)
                except OSError:
                    with contextlib.suppress(FileNotFoundError):
                        size = max(0, file.lstat().st_size - HEADER_BYTES)
                        self._index.add(file.name, ChunkInfo("", size), 0, hidden=True)
                        self._unreadable.add(file.name)
                    continue
                if chunk is not None and file.name == self.file(chunk[0]).name:
                    chunks.append(chunk)
                    continue
                self._count["corrupt"] += 1
            elif not file.name.endswith(_TEMPORARY):
                continue
            with contextlib.suppress(OSError):  # e.g. a directory of that name
                file.unlink()
        for key, used_ns in self._index.add_earlier(chunks).items():
            self._mark_file(key, used_ns)
