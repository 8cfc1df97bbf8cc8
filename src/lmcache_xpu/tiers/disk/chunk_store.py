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
import gc
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_USED_BYTES, LOAD_DISK
from lmcache_xpu.tiers import complain
from lmcache_xpu.tiers.disk.chunk_file import (
    TEMPORARY,
    ChunkInfo,
    disk_bytes,
    file_name,
    identify_chunk,
    list_chunks,
    read_chunk,
    write_chunk,
)
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex, Entry
from lmcache_xpu.tiers.disk.lock import DirectoryLock

# Misses are reads that delivered nothing, dropped puts that stored nothing, corrupt files that were
# removed for their content, errors system calls that failed.
_COUNTED = ("hits", "misses", "stored", "evicted", "dropped", "corrupt", "errors")
_FAULTS = {
    "io": "a chunk in %s could not be read: %s (docs: troubleshooting#disk-removed)",
    "stays": "a file can't be removed for others (%s) (docs: troubleshooting#disk-not-stored)",
    "corrupt": "a chunk was removed from %s: %s (docs: troubleshooting#disk-removed)",
}
_TRIES = 8  # files that can't be removed, for one chunk, before it is dropped


class ChunkStore:
    """Chunks under string keys in one directory, within a size, least recently used out first.

    Thread-safe: a lock guards the index, and no call waits for another thread's file. One process
    at a time; another has `lock_seconds` to let go of the directory, which is created (mode 0700)
    if it is missing. Files of other names in it are left alone. `limit_bytes` bounds all files,
    headers and those being written included.

    Raises SettingsError if the directory can't be used, is a link or another user's, or in use.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, lock_seconds: float = 5.0) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._count = Counter(dict.fromkeys(_COUNTED, 0))
        self._index = ChunkIndex(limit_bytes)
        self._serial = itertools.count()
        self._held = DirectoryLock(directory, lock_seconds)
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise SettingsError(
                f"directory {directory}: {error.strerror}", "one that can be listed"
            ) from error

    def __contains__(self, key: str) -> bool:
        return file_name(key) in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the store was opened, and the `bytes` that it holds now."""
        with self._lock:
            return {**self._count, "bytes": self._index.used_bytes}

    def now(self, count: int) -> int:
        """Take times of last use for `count` chunks, see `ChunkIndex.now`."""
        with self._lock:
            return self._index.now(count)

    def info(self, key: str) -> ChunkInfo | None:
        """Meta and size of a chunk, or None; reads a page of an earlier run's file, once."""
        return entry.info if (entry := self._entry(file_name(key))) else None

    def put(
        self,
        key: str,
        meta: str,
        payload: bytes | memoryview,
        used_ns: int | None = None,
        is_lent: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Store a chunk, evicting others for it; a stored one is only marked as used.

        `payload` has one-byte items, and must not change meanwhile; once it was written, `is_lent`
        says whether it was still the caller's. The chunk counts as used at `used_ns`, now if None,
        or when an earlier `touch` said. Returns whether it is stored now: not if it doesn't fit
        beside what is being written or was used later, its memory was taken back, or the store is
        closed. Raises ValueError if key and meta are too long, and OSError; then nothing of the
        file is left.
        """
        size, index, name = disk_bytes(len(payload)), self._index, file_name(key)
        with self._lock:
            used_ns = index.time_of_use(name, used_ns)
            if name in index:
                self._mark(name, used_ns)
                return True
            if not self._held.is_held or not self._make_room(size, used_ns):
                self._count["dropped"] += 1
                return False
            temporary = self._held.at(f"{next(self._serial)}{TEMPORARY}")
            index.reserved_bytes += size
        is_stored = False
        try:
            try:
                write_chunk(temporary, key, meta, memoryview(payload), used_ns)
            except FileNotFoundError:  # someone removed the directory, to free the disk in a hurry
                with self._lock:
                    self._make_again()
                    temporary = self._held.at(temporary.name)
                write_chunk(temporary, key, meta, memoryview(payload), used_ns)
            with self._lock:
                if is_lent():
                    self._add(temporary, name, key, ChunkInfo(meta, len(payload)), used_ns)
                    is_stored = True
            return is_stored
        except OSError:
            with self._lock:
                self._count["errors"] += 1
            raise
        finally:
            if not is_stored:
                with self._lock:
                    self._count["dropped"] += 1
                    try:
                        temporary.unlink(missing_ok=True)
                        index.reserved_bytes -= size
                    except OSError:  # it keeps its room
                        self._count["errors"] += 1

    def read(self, key: str, buffer: memoryview, is_lent: Callable[[], bool] | None = None) -> bool:
        """Read a chunk's payload into `buffer`, of its length; on a miss that may hold anything.

        A file that is truncated, damaged, another's or unreadable for the disk is removed. It stays
        if the fault is this process's, or if the buffer was taken back, as `is_lent` says. The time
        of last use does not change, see `touch`.
        """
        name = file_name(key)
        entry = self._entry(name)
        fault: str | None = ""  # empty: nothing to tell of, and yet a miss
        reason, is_to_go = "corrupt", False
        if entry is not None and entry.info.payload_bytes == len(buffer):
            try:
                fault = read_chunk(self._held.at(name), key, entry.info, buffer, is_lent)
                is_to_go = bool(fault) and (is_lent is None or is_lent())
            except FileNotFoundError:  # evicted since, or removed by hand
                is_to_go = True
            except OSError as error:
                fault, reason, is_to_go = str(error), "io", error.errno == errno.EIO
        with self._lock:
            self._count["hits" if fault is None else "misses"] += 1
            self._count["errors"] += reason == "io"
            if is_to_go and self._index.get(name) is entry:
                self._remove(name)
                self._count["corrupt"] += reason == "corrupt" and bool(fault)
        if fault and (is_to_go or reason == "io"):
            LOAD_DISK.failed(reason)
            complain(_FAULTS[reason], self.directory, fault)
        return fault is None

    def touch(self, keys: Sequence[str]) -> int:
        """Mark chunks as used now, each a nanosecond before the last; returns the first's time.

        That holds for one that is stored within a minute, too: the end of a prompt goes first,
        in whatever parts it was stored.
        """
        now = self.now(len(keys))
        for age, key in enumerate(keys):
            with self._lock:
                self._mark(file_name(key), now - age)
        return now

    def remove(self, key: str) -> bool:
        """Remove a chunk; False if it was not stored."""
        with self._lock:
            if is_stored := key in self:
                self._remove(file_name(key))
            return is_stored

    def remove_all(self, is_meant: Callable[[str], bool]) -> bool:
        """Remove chunks by their keys, "" where a file can't be read; False if one is left."""
        self._identify_all()
        with self._lock:  # the directory may belong to another process once the store is closed
            entries = ((name, self._index.get(name)) for name in self._index.names())
            names = [name for name, entry in entries if entry and is_meant(entry.key)]
            return self._held.is_held and not [n for n in names if not self._remove(n)]

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with each key now, and whenever it comes or goes, with the lock held."""
        self._identify_all()
        with self._lock:
            self._index.watch(changed)

    def close(self) -> None:
        """Let go of the directory. Later puts are refused; may be called twice."""
        with self._lock:
            self._held.release()

    def _identify_all(self) -> None:
        """Read a page of each file of earlier runs."""
        with self._lock:
            names = self._index.names()
        for name in names:
            self._entry(name)

    def _entry(self, name: str) -> Entry | None:
        """Return a chunk's entry; one of an earlier run is identified by its header first."""
        with self._lock:
            entry = self._index.get(name)
        if entry is None or entry.key:
            return entry
        try:
            chunk, was_read = identify_chunk(self._held.at(name)), True
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOENT):
                return None
            chunk, was_read = None, False
        with self._lock:  # the directory may belong to another process once the store is closed
            if self._held.is_held and self._index.get(name) is entry and not entry.key:
                if chunk is not None and file_name(chunk[0]) == name:
                    self._index.identify(name, *chunk)
                else:
                    self._remove(name)
                    self._count["corrupt"] += was_read
            return self._index.get(name)

    # The rest is called with the lock held, or before anybody else knows the store.

    def _make_again(self) -> None:
        """Make the directory if it was removed; raises OSError if that fails."""
        held, self._held = self._held, self._held.again()
        if held is not self._held:
            for name in self._index.names():
                self._index.remove(name)
            self._scan()

    def _scan(self) -> None:
        """Fill the index from the directory; remove what can't be a chunk, or is incomplete."""
        collects = gc.isenabled()
        gc.disable()  # it would look at each new entry again and again: a quarter of the time
        try:
            files, damaged = list_chunks(self._held.descriptor)
            ahead = self._index.add_earlier(files)
        finally:
            if collects:
                gc.enable()
        self._count["corrupt"] += damaged
        for name, used_ns in ahead.items():
            self._mark(name, used_ns)
        self._make_room(0, self._index.now())
        DISK_USED_BYTES.set(self._index.used_bytes)

    def _add(self, temporary: Path, name: str, key: str, info: ChunkInfo, used_ns: int) -> None:
        """Give a file that was written its name, and its reserved room to its entry."""
        if not self._held.is_held:  # the directory may belong to another process by now
            raise OSError("the store was closed during the write")
        temporary.rename(self._held.at(name))
        self._index.add(name, info, used_ns, key)
        self._index.reserved_bytes -= disk_bytes(info.payload_bytes)
        self._count["stored"] += 1
        DISK_USED_BYTES.set(self._index.used_bytes)
        self._mark(name, self._index.planned(name, used_ns))

    def _mark(self, name: str, used_ns: int) -> None:
        """Set a chunk's time of last use, if it is stored; kept over a restart."""
        if self._index.mark(name, used_ns):
            with contextlib.suppress(OSError):  # removed by hand: there is nothing to keep
                os.utime(self._held.at(name), ns=(used_ns, used_ns))

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
            self._held.at(name).unlink(missing_ok=True)
        except OSError as error:
            self._count["errors"] += 1
            complain(_FAULTS["stays"], error)
            return False
        self._index.remove(name)
        DISK_USED_BYTES.set(self._index.used_bytes)
        return True
