"""A directory of chunks that outlives the process: one file per chunk, found again by a scan.

A file gets its name only when it is complete (temporary file, then rename), so a killed writer
leaves nothing but a temporary file, and the next start removes those. Nothing is fsynced: after a
power cut the checksum finds what did not reach the disk, and a lost chunk is only recomputed.

The store knows neither LMCache nor vLLM; keys and meta are opaque strings.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_USED_BYTES, LOAD_DISK
from lmcache_xpu.tiers.disk.chunk_directory import ChunkDirectory
from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes, read_chunk, write_chunk
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex, Entry
from lmcache_xpu.tiers.pause import Complaint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["PIN_SECONDS", "ChunkStore", "Counters"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

PIN_SECONDS = 300.0
_TRIES = 8  # files that can't be removed, for one chunk, before it is dropped
_FAILED_READS = 3  # of one file, by the disk's fault, before it is not asked for again


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened since a store was opened, and the bytes it holds now.

    `misses` counts reads that delivered nothing, `dropped` puts that stored nothing, `corrupt`
    files removed because their content was not what it should be, `errors` failed system calls.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    errors: int = 0
    bytes: int = 0


class ChunkStore:
    """Chunks under string keys in one directory, within a size, least recently used out first.

    Safe for any number of threads: an internal lock guards the index, file contents are read and
    written outside it, and no call waits for another thread's file. One process at a time.

    Args:
        directory: created (mode 0700) if it is missing; files of other names in it are left alone.
        limit_bytes: bound on the files, headers included, those of earlier runs and those being
            written as well. Opening a store with a smaller limit evicts.
        left: directories that no rank has any more; their chunks become this store's.
        pin_seconds: a pin older than this no longer protects: a forgotten one would fill the store.
        lock_seconds: how long to wait for another process to let go of the directory.

    Raises:
        SettingsError: the directory can't be used, is a link or another user's, or another process
            uses it.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        left: Sequence[Path] = (),
        pin_seconds: float = PIN_SECONDS,
        lock_seconds: float = 5.0,
    ) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._files = ChunkDirectory(directory, left)
        self._index = ChunkIndex(limit_bytes, pin_seconds)
        self._count: Counter[str] = Counter()
        self._closed = False
        self._stuck = Complaint(
            "a file can't be removed for others (%s) (docs: troubleshooting#disk-not-stored)"
        )
        self._unreadable = Complaint(
            "a chunk in %s could not be read, and stays: %s (docs: troubleshooting#disk-removed)"
        )
        with self._lock:
            try:
                self._open(lock_seconds)
            except SettingsError:
                self._files.release()
                raise

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock:
            return Counters(**self._count, bytes=self._index.used_bytes)

    def now(self, count: int) -> int:
        """Take the time of last use for `count` chunks, see `ChunkIndex.now`."""
        with self._lock:
            return self._index.now(count)

    def info(self, key: str) -> ChunkInfo | None:
        """Meta and size of a chunk, or None; reads no file."""
        return entry.info if (entry := self._index.get(key)) else None

    def put(
        self,
        key: str,
        meta: str,
        payload: bytes | memoryview,
        used_ns: int | None = None,
        is_lent: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Store a chunk, evicting others for it; a key that is there is only marked as used.

        Args:
            key: name of the chunk.
            meta: returned by `info` as it is; must fit the header together with `key`.
            payload: one-byte items; must not change during the call.
            used_ns: counts as the time of last use; now if None, or if it is to come.
            is_lent: says whether the payload's memory was still the caller's, once it was read.

        Returns:
            True if the chunk is stored now; False if it doesn't fit beside what is pinned and
            being written, its memory was taken back, or the store is closed.

        Raises:
            ValueError: key and meta are too long for the header.
            OSError: the file could not be written; nothing of it is left, others are untouched.
        """
        need = disk_bytes(len(payload))
        stored, temporary = False, None
        try:
            with self._lock:
                now = self._index.now()
                used_ns = now if used_ns is None else min(used_ns, now)
                if key in self._index:
                    self._mark(key, used_ns)
                    stored = True
                elif not self._closed and self._make_room(need):
                    temporary = self._files.temporary()
                    self._index.reserve(temporary, need)
            if temporary is not None:
                self._write(temporary, key, meta, memoryview(payload), used_ns)
                with self._lock:
                    if is_lent():
                        self._publish(temporary, key, ChunkInfo(meta, len(payload)), used_ns)
                        stored = True
        except OSError:
            with self._lock:
                self._count["errors"] += 1
            raise
        finally:
            if not stored:
                self._give_up(temporary)
        return stored

    def read(self, key: str, buffer: memoryview, is_lent: Callable[[], bool] | None = None) -> bool:
        """Read a chunk's payload straight into `buffer`, whose length must be the payload's.

        A file that is truncated, damaged or another's is removed and counts as a miss. One that
        can't be read now is a miss as well, and stays, and so is every file when `is_lent` says
        that the buffer is not the caller's any more. The time of last use does not change, see
        `touch`.

        Returns:
            True if `buffer` holds the chunk; False on a miss, and then it may hold anything.
        """
        entry = self._index.get(key)
        if entry is None or entry.info.payload_bytes != len(buffer):
            with self._lock:
                self._count["misses"] += 1
            return False
        try:
            fault = read_chunk(self._files.file(key), key, entry.info, buffer, is_lent)
        except FileNotFoundError:
            fault = ""  # evicted since, or removed by hand
        except OSError as error:
            self._unread(key, entry, error)
            return False
        with self._lock:
            self._count.update(hits=int(fault is None), misses=int(fault is not None))
            if fault is not None and is_lent is not None and not is_lent():
                return False
            if fault is not None and self._index.get(key) is entry:
                self._remove(key)
                self._count["corrupt"] += bool(fault)
        if fault:
            LOAD_DISK.failed("corrupt")
            logger.warning(
                "Removed a chunk from %s: %s (docs: troubleshooting#disk-removed)",
                self.directory,
                fault,
            )
        return fault is None

    def touch(self, keys: Iterable[str]) -> int:
        """Mark chunks as used now, the first as the last used; kept over a restart.

        Returns:
            The time of the first; each further one counts as used a nanosecond before.
        """
        keys = list(keys)
        now = self.now(len(keys))
        for age, key in enumerate(keys):
            with self._lock:
                self._mark(key, now - age)
        return now

    def pin(self, key: str) -> bool:
        """Keep a chunk from eviction until as many `unpin`; False if it is not stored."""
        with self._lock:
            return self._index.pin(key)

    def unpin(self, key: str) -> bool:
        """Take one pin back; False if there was none."""
        with self._lock:
            return self._index.unpin(key)

    def pinned(self, key: str) -> bool:
        """Whether a pin holds `key`; it stays when the file turns out to be damaged."""
        with self._lock:
            return self._index.pinned(key)

    def remove(self, key: str) -> bool:
        """Remove a chunk, pinned or not; False if it was not stored."""
        with self._lock:
            if key not in self._index:
                return False
            self._remove(key)
            return True

    def remove_all(self, is_meant: Callable[[str], bool]) -> bool:
        """Remove chunks by their keys, pinned or not; False if a file could not be removed."""
        with self._lock:
            if self._closed:  # the directory may belong to another process by now
                return False
            # Nobody knows whose a file is that could not be read; a later start may read it.
            unreadable = self._files.unreadable
            keys = [key for key in self._index if key in unreadable or is_meant(key)]
        complete = True
        for key in keys:
            with self._lock:
                complete = self._remove(key) and complete
        return complete

    def clear(self) -> list[ChunkInfo]:
        """Remove all chunks that are not pinned, and return what they were."""
        with self._lock:
            chunks = self._index.unpinned()
            for key in chunks:
                self._remove(key)
            return list(chunks.values())

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with each key now, and whenever it comes or goes.

        The store is locked meanwhile: `changed` must not call it.
        """
        with self._lock:
            self._index.watch(changed)

    def close(self) -> None:
        """Let go of the directory. Later puts are refused; may be called twice."""
        with self._lock:
            self._closed = True
            self._files.release()

    def _write(self, name: str, key: str, meta: str, payload: memoryview, used_ns: int) -> None:
        try:
            write_chunk(self._files.at(name), key, meta, payload, used_ns)
        except FileNotFoundError:
            # Someone removed the directory, e.g. to free the disk in a hurry.
            with self._lock:
                self._reopen()
            write_chunk(self._files.at(name), key, meta, payload, used_ns)

    def _give_up(self, temporary: str | None) -> None:
        """Count a chunk that was not stored; what can't be removed of it keeps its room."""
        with self._lock:
            self._count["dropped"] += 1
            if temporary is None:
                return
            try:
                self._files.discard(temporary)
            except OSError:
                self._count["errors"] += 1
            else:
                self._index.release(temporary)

    def _unread(self, key: str, entry: Entry, error: OSError) -> None:
        """Count a read that failed: of this process, of a disk that is gone, or of this file."""
        with self._lock:
            self._count.update(misses=1, errors=1)
            entry.failed_reads += error.errno == errno.EIO
            if entry.failed_reads >= _FAILED_READS and self._index.get(key) is entry:
                self._index.hide(key)  # stored anew, it is another file
        LOAD_DISK.failed("io")
        self._unreadable.log(self.directory, error)

    # The lock is held in everything below.

    def _publish(self, temporary: str, key: str, info: ChunkInfo, used_ns: int) -> None:
        """Give a complete file its name, and let it be read."""
        if self._closed:  # the directory may belong to another process by now
            raise OSError("the store was closed during the write")
        name = self._files.publish(temporary, key)
        self._index.remove(name)  # a file that could not be read had this name
        # At once, or another put would find it counted twice, and evict for it.
        self._index.release(temporary)
        self._index.add(key, info, used_ns)
        DISK_USED_BYTES.set(self._index.used_bytes)
        self._count["stored"] += 1

    def _open(self, lock_seconds: float) -> None:
        """Take the directory, and build the index from the files' headers."""
        try:
            self._files.open(lock_seconds)
            self._index.clear()
            chunks = list(self._files.scan())
            self._count["corrupt"] += chunks.count(None)
            for key, used_ns in self._index.add_earlier(filter(None, chunks)).items():
                self._files.mark(key, used_ns)
            for name, size in self._files.unreadable.items():
                self._index.add(name, ChunkInfo("", size), 0, hidden=True)
            self._make_room(0)
            DISK_USED_BYTES.set(self._index.used_bytes)
        except OSError as error:
            raise SettingsError(
                f"directory {self.directory}: {error.strerror}",
                "one that this user owns, or may create, and can write to",
            ) from error

    def _reopen(self) -> None:
        if self._closed or self._files.is_in_place():  # another thread was faster
            return
        try:
            self._open(lock_seconds=0)
        except SettingsError as error:
            raise OSError(str(error)) from error

    def _mark(self, key: str, used_ns: int) -> None:
        if self._index.mark(key, used_ns):
            self._files.mark(key, used_ns)

    def _remove(self, key: str) -> bool:
        """Remove a chunk; one whose file stays is hidden, keeps its room, and False is returned."""
        try:
            self._files.remove(key)
        except OSError:
            self._count["errors"] += 1
            self._index.hide(key)
            return False
        self._index.remove(key)
        DISK_USED_BYTES.set(self._index.used_bytes)
        return True

    def _make_room(self, need: int) -> bool:
        """Evict until `need` more bytes fit; False if they can't, or files can't be removed."""
        if not self._index.fits(need) and not self._index.can_fit(need):
            return False
        failed = 0
        for key in self._index.evict(need):
            try:
                self._files.remove(key)
            except OSError as error:
                self._count["errors"] += 1
                self._stuck.log(error)
                self._index.mark(key, self._index.now())
                failed += 1
                if failed == _TRIES:
                    break
            else:
                self._index.remove(key)
                self._count["evicted"] += 1
        return self._index.fits(need)
