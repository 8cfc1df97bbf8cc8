"""A directory of chunks that outlives the process: one file per chunk, found again by a scan.

A file gets its name only when it is complete (temporary file, then rename), so a killed writer
leaves nothing but a temporary file, and the next start removes those. Nothing is fsynced: after a
power cut the checksum finds what did not reach the disk, and a lost chunk is only recomputed.

The store knows neither LMCache nor vLLM; keys and meta are opaque strings.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import LOAD_DISK
from lmcache_xpu.tiers.disk.chunk_directory import ChunkDirectory
from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes, read_chunk, write_chunk
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex
from lmcache_xpu.tiers.disk.counters import Counters

__all__ = ["ChunkStore"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only


class ChunkStore:
    """Chunks under string keys in one directory, within a size, least recently used out first.

    Safe for any number of threads: an internal lock guards the index, file contents are read and
    written outside it, and no call waits for another thread's file. One process at a time: the
    directory is held with flock, which the kernel releases however the process ends.

    Args:
        directory: created (mode 0700) if it is missing; files of other names in it are left alone.
        limit_bytes: bound on the files, headers included, those of earlier runs and those being
            written as well. Opening a store with a smaller limit evicts; 0 empties it.
        left: directories that no rank has any more; their chunks become this store's.
        pin_seconds: a pin older than this no longer protects, so that a forgotten one can't fill
            the store for good.
        lock_seconds: how long to wait for another process to let go of the directory.

    Raises:
        SettingsError: the directory can't be used, or another process uses it.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        left: Sequence[Path] = (),
        pin_seconds: float = 300.0,
        lock_seconds: float = 5.0,
    ) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._files = ChunkDirectory(directory, left)
        self._index = ChunkIndex(limit_bytes, pin_seconds)
        self._count: Counter[str] = Counter()
        self._closed = False
        with self._lock:
            self._open(lock_seconds)

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock:
            return Counters(**self._count, bytes=self._index.used_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the files."""
        return self._index.used_bytes

    def info(self, key: str) -> ChunkInfo | None:
        """What is stored under `key`, or None; reads no file."""
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
            used_ns: counts as the time of last use; now if None.
            is_lent: says whether the payload's memory was still the caller's, once it was read.

        Returns:
            True if the chunk is stored now; False if it doesn't fit beside what is pinned and
            being written, its memory was taken back, or the store is closed.

        Raises:
            ValueError: key and meta are too long for the header.
            OSError: the file could not be written; nothing of it is left, others are untouched.
        """
        used_ns = time.time_ns() if used_ns is None else used_ns
        need = disk_bytes(len(payload))
        with self._lock:
            if key in self._index:
                self._mark(key, used_ns)
                return True
            if self._closed or not self._make_room(need):
                self._count["dropped"] += 1
                return False
            temporary = self._files.temporary()
            self._index.reserve(temporary.name, need)
        try:
            self._write(temporary, key, meta, memoryview(payload), used_ns)
            with self._lock:
                if lent := is_lent():
                    self._publish(temporary, key, ChunkInfo(meta, len(payload)), used_ns)
                else:
                    temporary.unlink()
                    self._count["dropped"] += 1
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            with self._lock:
                self._count.update(dropped=1, errors=int(isinstance(error, OSError)))
            raise
        finally:
            with self._lock:
                self._index.release(temporary.name)
        return lent

    def read(self, key: str, buffer: memoryview, is_lent: Callable[[], bool] | None = None) -> bool:
        """Read a chunk's payload straight into `buffer`, whose length must be the payload's.

        A file that is truncated, damaged, another's, or unreadable is removed and counts as a
        miss. So does a buffer that is not the caller's any more, by `is_lent`, but the file stays.
        The time of last use does not change, see `touch`.

        Returns:
            True if `buffer` holds the chunk; False on a miss, and then it may hold anything.
        """
        entry = self._index.get(key)
        if entry is None or entry.info.payload_bytes != len(buffer):
            with self._lock:
                self._count["misses"] += 1
            return False
        failed = False
        try:
            fault = read_chunk(self._path(key), key, entry.info, buffer, is_lent)
        except FileNotFoundError:
            fault = ""  # evicted since, or removed by hand
        except OSError as error:
            fault, failed = str(error), True
        with self._lock:
            self._count.update(hits=int(fault is None), misses=int(fault is not None))
            if fault is not None and is_lent is not None and not is_lent():
                return False
            self._count["errors"] += failed
            if fault is not None and self._index.get(key) is entry:
                self._remove(key)
                self._count["corrupt"] += bool(fault) and not failed
        if fault:
            LOAD_DISK.failed("io" if failed else "corrupt")
            logger.warning(
                "Removed a chunk from %s: %s (docs: troubleshooting#disk-removed)",
                self.directory,
                fault,
            )
        return fault is None

    def touch(self, keys: Iterable[str]) -> None:
        """Mark chunks as used now, the first as the last used; kept over a restart."""
        now = time.time_ns()
        for age, key in enumerate(keys):
            with self._lock:
                self._mark(key, now - age)

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
            keys = [key for key in self._index if is_meant(key)]
        complete = True
        for key in keys:
            with self._lock:
                self._remove(key)
                complete = complete and not self._path(key).exists()
        return complete

    def clear(self) -> list[ChunkInfo]:
        """Remove all chunks that are not pinned, and return what they were."""
        with self._lock:
            chunks = self._index.unpinned()
            for key in chunks:
                self._remove(key)
            return list(chunks.values())

    def watch(self, changed: Callable[[str, bool], None]) -> None:
        """Call `changed` with each key and whether it is stored: now, and when that changes.

        The store is locked meanwhile: `changed` must not call it.
        """
        with self._lock:
            self._index.watch(changed)

    def close(self) -> None:
        """Let go of the directory. Later puts are refused; may be called twice."""
        with self._lock:
            self._closed = True
            self._files.release()

    def _write(self, file: Path, key: str, meta: str, payload: memoryview, used_ns: int) -> None:
        try:
            write_chunk(file, key, meta, payload, used_ns)
        except FileNotFoundError:
            # Someone removed the directory, e.g. to free the disk in a hurry.
            with self._lock:
                self._reopen()
            write_chunk(file, key, meta, payload, used_ns)

    # The lock is held in everything below.

    def _path(self, key: str) -> Path:
        return self._files.file(key)

    def _publish(self, temporary: Path, key: str, info: ChunkInfo, used_ns: int) -> None:
        """Give a complete file its name, and let it be read."""
        if self._closed:  # the directory may belong to another process by now
            raise OSError("the store was closed during the write")
        temporary.rename(self._path(key))
        # At once, or another put would find it counted twice, and evict for it.
        self._index.release(temporary.name)
        self._index.add(key, info, used_ns)
        self._count["stored"] += 1

    def _open(self, lock_seconds: float) -> None:
        """Take the directory, and build the index from the files' headers."""
        try:
            self._files.open(lock_seconds)
            self._index.clear()
            for chunk in self._files.scan():
                if chunk is None:
                    self._count["corrupt"] += 1
                else:
                    self._index.add(*chunk)
            self._make_room(0)
        except OSError as error:
            self._files.release()
            raise SettingsError(
                f"directory {self.directory}: {error.strerror}",
                "one that this user owns, or may create, and can write to",
            ) from error

    def _reopen(self) -> None:
        if self._closed or self.directory.exists():  # another thread was faster
            return
        self._files.release()
        try:
            self._open(lock_seconds=0)
        except SettingsError as error:
            raise OSError(str(error)) from error

    def _mark(self, key: str, used_ns: int) -> None:
        if self._index.mark(key, used_ns):
            self._files.mark(key, used_ns)

    def _remove(self, key: str) -> None:
        self._index.remove(key)
        self._files.remove(key)

    def _make_room(self, need: int) -> bool:
        """Evict until `need` more bytes fit; False, with nothing evicted, if they can't."""
        possible = self._index.fits(need) or self._index.can_fit(need)
        for key in self._index.evict(need) if possible else ():
            self._remove(key)
            self._count["evicted"] += 1
        return possible
