"""A directory of chunks that outlives the process: one file per chunk, found again by a scan.

A file gets its name only when it is complete (temporary file, then rename), so a killed writer
leaves a temporary file, and the next start removes it. Nothing is fsynced: after a power cut the
checksum finds what did not reach the disk, and a lost chunk is only recomputed.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import LOAD_DISK
from lmcache_xpu.tiers.disk.chunk_directory import ChunkDirectory
from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes, read_chunk, write_chunk
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex, Entry
from lmcache_xpu.tiers.pause import Complaint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["PIN_SECONDS", "ChunkStore"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

PIN_SECONDS = 300.0
_COUNTED = ("hits", "misses", "stored", "evicted", "dropped", "corrupt", "errors")
_FAILED_READS = 3  # of one file, by the disk's fault, before it is not asked for again


class ChunkStore:
    """Chunks under string keys in one directory, within a size, least recently used out first.

    Thread-safe: a lock guards the index, and no call waits for another thread's file. One process
    at a time. Knows neither LMCache nor vLLM.

    Args:
        directory: created (mode 0700) if it is missing; files of other names in it are left alone.
        limit_bytes: bound on all files, headers and those being written included.
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
        pin_seconds: float = PIN_SECONDS,
        lock_seconds: float = 5.0,
    ) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._count = Counter(dict.fromkeys(_COUNTED, 0))
        self._index = ChunkIndex(limit_bytes, pin_seconds)
        self._files = ChunkDirectory(directory, self._index, self._count)
        self._closed = False
        self._unreadable = Complaint(
            "a chunk in %s could not be read, and stays: %s (docs: troubleshooting#disk-removed)"
        )
        with self._lock:
            try:
                self._files.open(lock_seconds)
            except SettingsError:
                self._files.release()
                raise
            except OSError as error:
                self._files.release()
                raise SettingsError(
                    f"directory {directory}: {error.strerror}",
                    "one that this user owns, or may create, and can write to",
                ) from error

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the store was opened, and the `bytes` that it holds now.

        `misses` are reads that delivered nothing, `dropped` puts that stored nothing, `corrupt`
        files that were removed for their content, `errors` system calls that failed.
        """
        with self._lock:
            return {**self._count, "bytes": self._index.used_bytes}

    def now(self, count: int) -> int:
        """Take times of last use for `count` chunks, see `ChunkIndex.now`."""
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
        """Store a chunk, evicting others for it; a stored one is only marked as used.

        Args:
            key: name of the chunk.
            meta: returned by `info` as it is; must fit the header together with `key`.
            payload: one-byte items; must not change during the call.
            used_ns: time of last use; now if None, or if it is to come. Unless it is None, a time
                that `touch` has set before goes first.
            is_lent: says whether the payload was still the caller's, once it was written.

        Returns:
            True if the chunk is stored now; False if it doesn't fit beside what is pinned, being
            written or was used later, its memory was taken back, or the store is closed.

        Raises:
            ValueError: key and meta are too long for the header.
            OSError: the file could not be written; nothing of it is left, others are untouched.
        """
        size = disk_bytes(len(payload))
        with self._lock:
            now = self._index.now()
            planned_ns = self._index.planned(key, now if used_ns is None else min(used_ns, now))
            used_ns = now if used_ns is None else planned_ns
            if key in self._index:
                self._files.mark(key, used_ns)
                return True
            if self._closed or not self._files.make_room(size, used_ns):
                self._count["dropped"] += 1
                return False
            temporary = self._files.temporary()
            self._index.reserve(size)
        stored = False
        try:
            self._write(temporary, key, meta, memoryview(payload), used_ns)
            with self._lock:
                if is_lent():
                    if self._closed:  # the directory may belong to another process by now
                        raise OSError("the store was closed during the write")
                    self._files.publish(temporary, key, ChunkInfo(meta, len(payload)), used_ns)
                    self._count["stored"] += 1
                    stored = True
                    if (marked_ns := self._index.planned(key, used_ns)) != used_ns:
                        self._files.mark(key, marked_ns)
        except OSError:
            with self._lock:
                self._count["errors"] += 1
            raise
        finally:
            if not stored:
                self._give_up(temporary, size)
        return stored

    def read(
        self, key: str, buffer: memoryview, is_lent: Callable[[], bool] = lambda: True
    ) -> bool:
        """Read a chunk's payload into `buffer`, whose length must be the payload's.

        A file that is truncated, damaged or another's is removed. One that can't be read now
        stays, and so does any whose buffer was taken back, as `is_lent` says. The time of last
        use does not change, see `touch`.

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
            if fault is None:
                self._count["hits"] += 1
                return True
            self._count["misses"] += 1
            if not is_lent():
                return False
            if self._index.get(key) is entry:
                self._files.remove(key)
                self._count["corrupt"] += bool(fault)
        if fault:
            LOAD_DISK.failed("corrupt")
            logger.warning(
                "Removed a chunk from %s: %s (docs: troubleshooting#disk-removed)",
                self.directory,
                fault,
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
                self._files.mark(key, now - age)
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
        """Whether a pin holds `key`; it outlasts a damaged file."""
        with self._lock:
            return self._index.pinned(key)

    def remove(self, key: str) -> bool:
        """Remove a chunk, pinned or not; False if it was not stored."""
        with self._lock:
            is_stored = key in self._index
            if is_stored:
                self._files.remove(key)
            return is_stored

    def remove_all(self, is_meant: Callable[[str], bool]) -> bool:
        """Remove chunks by their keys, pinned or not; False if a file could not be removed."""
        with self._lock:  # the directory may belong to another process once the store is closed
            return not self._closed and self._files.remove_all(is_meant)

    def watch(self, changed: Callable[[str], object]) -> None:
        """Call `changed` with each key now, and whenever it comes or goes, with the lock held."""
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
        except FileNotFoundError:  # someone removed the directory, to free the disk in a hurry
            with self._lock:
                self._files.reopen()
            write_chunk(self._files.at(name), key, meta, payload, used_ns)

    def _give_up(self, temporary: str, size_bytes: int) -> None:
        """Count a chunk that was not stored; a file of it that can't be removed keeps its room."""
        with self._lock:
            self._count["dropped"] += 1
            try:
                self._files.discard(temporary)
            except OSError:
                self._count["errors"] += 1
            else:
                self._index.reserve(-size_bytes)

    def _unread(self, key: str, entry: Entry, error: OSError) -> None:
        """Count a read that failed, by the fault of this process, of the disk or of the file."""
        with self._lock:
            self._count.update(misses=1, errors=1)
            entry.failed_reads += error.errno == errno.EIO
            if entry.failed_reads >= _FAILED_READS and self._index.get(key) is entry:
                self._index.hide(key)  # stored anew, it is another file
        LOAD_DISK.failed("io")
        self._unreadable.log(self.directory, error)
