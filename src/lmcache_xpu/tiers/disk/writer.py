"""Writes to the disk tier: queued and bounded, in threads of their own."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.metrics import STORE_DISK
from lmcache_xpu.tiers import complain
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

_DRAIN_SECONDS = 10.0
BEHIND = (
    "the disk is slower than the engine; not everything is stored "
    "(docs: troubleshooting#disk-behind)"
)
FAILED = (
    "a chunk could not be stored and was dropped (%s); if the disk is full, free space "
    "or make disk_gib smaller (docs: troubleshooting#disk-not-stored)"
)


class DiskWriter:
    """Writes chunks, holding a reference to each until its write has ended. Thread-safe.

    `limit_bytes` bounds the chunks whose writes have not ended; a larger one is taken when it is
    alone. So many threads write: of two chunks with room for one, either may be kept.
    """

    def __init__(self, store: ChunkStore, limit_bytes: int, threads: int) -> None:
        self.dropped = 0  # chunks
        self.pending: dict[str, Future[None]] = {}  # writes that have not ended, by chunks' names
        self._store = store
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(threads, "disk-write")

    def submit(
        self,
        keys: list[CacheEngineKey] | list[ObjectKey],
        names: list[str],
        objs: list[MemoryObj],
        used_ns: int,
    ) -> None:
        """Queue chunks; those that are stored or queued are skipped.

        A chunk that exceeds the bound is dropped with all that follow it: they are of no use
        without it. The first counts as used at `used_ns`, each further one a nanosecond before.
        """
        for age, (key, name, obj) in enumerate(zip(keys, names, objs, strict=True)):
            with self._lock:
                if name in self.pending or name in self._store:
                    continue
                after = self._pending_bytes + obj.get_size()
                if self._closed or (self.pending and after > self._limit_bytes):
                    self.dropped += len(keys) - age
                    break
                obj.ref_count_up()
                write = partial(self._write, key, name, obj, used_ns - age)
                future = self._threads.submit(self._run, name, obj, write)
                self.pending[name] = future
                self._pending_bytes = after
            future.add_done_callback(partial(self._drop_cancelled, name, obj))
        else:
            return
        if not self._closed:
            STORE_DISK.failed("behind")
            complain(BEHIND)

    def cancel(self, is_meant: Callable[[str], bool]) -> bool:
        """Drop queued writes and wait for those under way; whether they ended in ten seconds."""
        with self._lock:
            writes = [future for name, future in self.pending.items() if is_meant(name)]
        under_way = [future for future in writes if not future.cancel()]
        return not wait(under_way, timeout=_DRAIN_SECONDS).not_done

    def close(self) -> None:
        """Refuse further chunks and end the queued writes; those not begun in 10 s are dropped."""
        with self._lock:
            self._closed = True
            writes = list(self.pending.values())
        wait(writes, timeout=_DRAIN_SECONDS)
        self._threads.shutdown(cancel_futures=True)

    def _run(self, name: str, obj: MemoryObj, write: Callable[[], None]) -> None:
        try:
            write()
        finally:  # before the future ends: who waits for it may store the chunk again
            self._forget(name, obj)

    def _write(
        self, key: CacheEngineKey | ObjectKey, name: str, obj: MemoryObj, used_ns: int
    ) -> None:
        begun, layout = time.perf_counter(), ChunkLayout.of(obj)
        if layout is None:
            self.dropped += 1
            return
        try:
            if self._store.put(name, layout.text, obj.byte_array, used_ns, obj.is_valid):
                layout.count(STORE_DISK, key, begun)
            elif obj.is_valid():
                STORE_DISK.failed("crowded")
                complain("a chunk found no room; not stored (docs: troubleshooting#disk-crowded)")
            else:  # LMCache's server lends memory for a time only
                STORE_DISK.failed("behind")
                complain(BEHIND)
        except (OSError, ValueError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            STORE_DISK.failed("full" if full else "io")
            complain(FAILED, error)

    def _drop_cancelled(self, name: str, obj: MemoryObj, write: Future[None]) -> None:
        if write.cancelled():
            self._forget(name, obj, is_dropped=True)

    def _forget(self, name: str, obj: MemoryObj, *, is_dropped: bool = False) -> None:
        size = obj.get_size()
        obj.ref_count_down()
        with self._lock:
            self.dropped += is_dropped
            del self.pending[name]
            self._pending_bytes -= size
