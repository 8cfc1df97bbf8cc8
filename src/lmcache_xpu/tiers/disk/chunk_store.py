"""A directory of chunks that outlives the process: one file per chunk, found again by its name.

A file gets its name, the hash of the chunk's key, only when it is complete (temporary file, then
rename), so a killed writer leaves a temporary file, and the next start removes it. A start lists
the directory and opens no file; what an earlier run left is looked at when it is first asked for.
Nothing is fsynced: after a power cut the checksum finds what did not reach the disk, and a lost
chunk is only recomputed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_USED_BYTES, LOAD_DISK
from lmcache_xpu.tiers.complaints import complain
from lmcache_xpu.tiers.disk.chunk_file import (
    HEADER_BYTES,
    ChunkInfo,
    disk_bytes,
    identify_chunk,
    read_chunk,
    write_chunk,
)
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex, Entry
from lmcache_xpu.tiers.disk.lock import DirectoryLock

# Misses are reads that delivered nothing, dropped puts that stored nothing, corrupt files that were
# removed for their content, errors system calls that failed.
_COUNTED = ("hits", "misses", "stored", "evicted", "dropped", "corrupt", "errors")
_SUFFIX = ".lmxkv"
_TEMPORARY = ".lmxkv.tmp"
_TRIES = 8  # files that can't be removed, for one chunk, before it is dropped


class ChunkStore:
    """Chunks under string keys in one directory, within a size, least recently used out first.

    Thread-safe: a lock guards the index, and no call waits for another thread's file. One process
    at a time. Knows neither LMCache nor vLLM.

    Args:
        directory: created (mode 0700) if it is missing; files of other names in it are left alone.
        limit_bytes: bound on all files, headers and those being written included.
        lock_seconds: how long to wait for another process to let go of the directory.

    Raises SettingsError if the directory can't be used, is a link or another user's, or in use.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, lock_seconds: float = 5.0) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._count = Counter(dict.fromkeys(_COUNTED, 0))
        self._index = ChunkIndex(limit_bytes)
        self._held: DirectoryLock | None = None
        self._serial = itertools.count()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = DirectoryLock(directory, lock_seconds)
            self._scan()
        except OSError as error:
            self.close()
            raise SettingsError(
                f"directory {directory}: {error.strerror}",
                "one that this user owns, or may create, and can write to",
            ) from error

    def __contains__(self, key: str) -> bool:
        return _name(key) in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the store was opened, and the `bytes` that it holds now."""
        with self._lock:
            return {**self._count, "bytes": self._index.used_bytes}

    def file(self, key: str) -> Path:
        """Return where the chunk of this key is, or would be."""
        return self._at(_name(key))

    def now(self, count: int) -> int:
        """Take times of last use for `count` chunks, see `ChunkIndex.now`."""
        with self._lock:
            return self._index.now(count)

    def info(self, key: str) -> ChunkInfo | None:
        """Meta and size of a chunk, or None; reads a page of an earlier run's file, once."""
        return entry.info if (entry := self._entry(_name(key))) else None

    def put(
        self,
        key: str,
        meta: str,
        payload: bytes | memoryview,
        used_ns: int | None = None,
        is_lent: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Store a chunk, evicting others for it; a stored one is only marked as used.

        Args:
            key: name of the chunk.
            meta: returned by `info` as it is; must fit the header together with `key`.
            payload: one-byte items; must not change during the call.
            used_ns: time of last use; now if None, or if it is to come. One that `touch` has set
                before goes first.
            is_lent: says whether the payload was still the caller's, once it was written.

        Returns whether the chunk is stored now. It is not if it doesn't fit beside what is being
        written or was used later, its memory was taken back, or the store is closed. Raises
        ValueError if key and meta are too long, and OSError; then nothing of the file is left.
        """
        size, index, name = disk_bytes(len(payload)), self._index, _name(key)
        with self._lock:
            now = index.now()
            planned_ns = index.planned(name, now if used_ns is None else min(used_ns, now))
            used_ns = now if used_ns is None else planned_ns
            if name in index:
                self._mark(name, used_ns)
                return True
            if self._held is None or not self._make_room(size, used_ns):
                self._count["dropped"] += 1
                return False
            temporary = self._at(f"{next(self._serial)}{_TEMPORARY}")
            index.reserve(size)
        try:
            try:
                write_chunk(temporary, key, meta, memoryview(payload), used_ns)
            except FileNotFoundError:  # someone removed the directory, to free the disk in a hurry
                with self._lock:
                    self._make_again()
                    temporary = self._at(temporary.name)
                write_chunk(temporary, key, meta, memoryview(payload), used_ns)
            with self._lock:
                if is_lent():
                    if self._held is None:  # the directory may belong to another process by now
                        raise OSError("the store was closed during the write")
                    temporary.rename(self._at(name))
                    index.add(name, ChunkInfo(meta, len(payload)), used_ns, key)
                    # At once, or another put would find it counted twice, and evict for it.
                    index.reserve(-size)
                    size = 0
                    self._count["stored"] += 1
                    DISK_USED_BYTES.set(index.used_bytes)
                    if (marked_ns := index.planned(name, used_ns)) != used_ns:
                        self._mark(name, marked_ns)
                    return True
            return False
        except OSError:
            with self._lock:
                self._count["errors"] += 1
            raise
        finally:
            if size:
                with self._lock:
                    self._count["dropped"] += 1
                    try:
                        temporary.unlink(missing_ok=True)
                        index.reserve(-size)
                    except OSError:  # it keeps its room
                        self._count["errors"] += 1

    def read(
        self, key: str, buffer: memoryview, is_lent: Callable[[], bool] = lambda: True
    ) -> bool:
        """Read a chunk's payload into `buffer`, of its length; on a miss that may hold anything.

        A file that is truncated, damaged, another's or unreadable for the disk is removed. It stays
        if the fault is this process's, or if the buffer was taken back, as `is_lent` says. The time
        of last use does not change, see `touch`.
        """
        entry, stays = self._entry(name := _name(key)), True
        fault: str | None = ""
        if entry is not None and entry.info.payload_bytes == len(buffer):
            try:
                fault = read_chunk(self._at(name), key, entry.info, buffer, is_lent)
                stays = not is_lent()
            except FileNotFoundError:
                stays = False  # evicted since, or removed by hand
            except OSError as error:
                stays = error.errno != errno.EIO
                LOAD_DISK.failed("io")
                complain(
                    "a chunk in %s could not be read: %s (docs: troubleshooting#disk-removed)",
                    *(self.directory, error),
                )
                with self._lock:
                    self._count["errors"] += 1
        with self._lock:
            self._count["misses" if fault is not None else "hits"] += 1
            if fault is None or stays:
                return fault is None
            if self._index.get(name) is entry:
                self._remove(name)
                self._count["corrupt"] += bool(fault)
        if fault:
            LOAD_DISK.failed("corrupt")
            complain(
                "a chunk was removed from %s: %s (docs: troubleshooting#disk-removed)",
                *(self.directory, fault),
            )
        return False

    def touch(self, keys: Iterable[str]) -> int:
        """Mark chunks as used now, each a nanosecond before the last; returns the first's time.

        That holds for one that is stored within a minute, too: the end of a prompt goes first,
        in whatever parts it was stored.
        """
        keys = list(keys)
        now = self.now(len(keys))
        for age, key in enumerate(keys):
            with self._lock:
                self._mark(_name(key), now - age)
        return now

    def remove(self, key: str) -> bool:
        """Remove a chunk; False if it was not stored."""
        with self._lock:
            is_stored = (name := _name(key)) in self._index
            if is_stored:
                self._remove(name)
            return is_stored

    def remove_all(self, is_meant: Callable[[str], bool]) -> bool:
        """Remove chunks by their keys; False if a file could not be removed.

        Reads a page of each file of earlier runs. One that can't be read counts as of the key "".
        """
        self._identify_all()
        with self._lock:  # the directory may belong to another process once the store is closed
            names = [name for name, entry in self._index.items() if is_meant(entry.key)]
            return self._held is not None and not [n for n in names if not self._remove(n)]

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with each key now, and whenever it comes or goes, with the lock held.

        Reads a page of each file of earlier runs.
        """
        self._identify_all()
        with self._lock:
            self._index.watch(changed)

    def close(self) -> None:
        """Let go of the directory. Later puts are refused; may be called twice."""
        with self._lock:
            if self._held is not None:
                self._held.release()
                self._held = None

    def _identify_all(self) -> None:
        for name, _ in self._index.items():
            self._entry(name)

    def _entry(self, name: str) -> Entry | None:
        """Return a chunk's entry; one of an earlier run is identified by its header first."""
        entry = self._index.get(name)
        if entry is None or entry.key:
            return entry
        chunk, was_read = None, True
        try:
            chunk = identify_chunk(self._at(name))
        except OSError as error:
            was_read = False
            if error.errno not in (errno.EIO, errno.ENOENT):
                return None
        with self._lock:  # the directory may belong to another process once the store is closed
            if self._held is not None and self._index.get(name) is entry and not entry.key:
                if chunk is not None and _name(chunk[0]) == name:
                    self._index.identify(name, *chunk)
                else:
                    self._remove(name)
                    self._count["corrupt"] += was_read
            return self._index.get(name)

    # The rest is called with the lock held, or before anybody else knows the store.

    def _at(self, name: str) -> Path:
        return (self.directory if (held := self._held) is None else held.held) / name

    def _make_again(self) -> None:
        """Make the directory if it was removed; raises OSError if that fails."""
        gone, directory = self._held, self.directory
        if gone is None:
            return
        if directory.is_dir() and os.path.samestat(gone.held.stat(), directory.stat()):
            return
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._held = DirectoryLock(directory, 0)
        except SettingsError as error:
            raise OSError(str(error)) from error
        gone.release()
        for name, _ in self._index.items():
            self._index.remove(name)
        self._scan()

    def _scan(self) -> None:
        """Fill the index from the directory; remove what can't be a chunk, or is incomplete."""
        for name, used_ns in self._index.add_earlier(self._files()).items():
            self._mark(name, used_ns)
        self._make_room(0, self._index.now())
        DISK_USED_BYTES.set(self._index.used_bytes)

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """Yield times of last use, names and bytes of the payload."""
        assert self._held is not None
        user = os.geteuid()
        for file in os.scandir(self._held.descriptor):  # twice as fast as by its path
            try:
                if file.name.endswith(_SUFFIX):
                    status = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == user:
                        if (payload_bytes := status.st_size - HEADER_BYTES) >= 0:
                            yield status.st_mtime_ns, file.name, payload_bytes
                            continue
                        self._count["corrupt"] += 1
                elif not file.name.endswith(_TEMPORARY):
                    continue
                self._at(file.name).unlink()
            except OSError:  # e.g. a directory of that name
                continue

    def _mark(self, name: str, used_ns: int) -> None:
        """Set a chunk's time of last use, if it is stored; kept over a restart."""
        if self._index.mark(name, used_ns):
            with contextlib.suppress(OSError):  # removed by hand: there is nothing to keep
                os.utime(self._at(name), ns=(used_ns, used_ns))

    def _make_room(self, need_bytes: int, used_ns: int) -> bool:
        """Evict what was used before, until so much more fits; False if it can't."""
        index, failed = self._index, 0
        if need_bytes + index.reserved_bytes > index.limit_bytes:
            return False
        while not index.fits(need_bytes) and failed < _TRIES and (oldest := index.oldest()):
            if oldest[0] > used_ns:
                break
            if self._remove(oldest[1]):
                self._count["evicted"] += 1
            else:
                index.mark(oldest[1], index.now())
                failed += 1
        return index.fits(need_bytes)

    def _remove(self, name: str) -> bool:
        """Remove a chunk; one whose file can't be removed stays, and False is returned."""
        try:
            self._at(name).unlink(missing_ok=True)
        except OSError as error:
            self._count["errors"] += 1
            complain(
                "a file can't be removed for others (%s) (docs: troubleshooting#disk-not-stored)",
                error,
            )
            return False
        self._index.remove(name)
        DISK_USED_BYTES.set(self._index.used_bytes)
        return True


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"
