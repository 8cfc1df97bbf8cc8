"""Reads from the disk tier, into LMCache's CPU pool."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from lmcache_xpu.metrics import DISK_USED_BYTES, LOAD_DISK, Stopwatch
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.complaint import Complaint
from lmcache_xpu.tiers.disk.writer import counts_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache.utils import CacheEngineKey
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
    from lmcache_xpu.tiers.disk.holdings import Holdings, StoredChunk

__all__ = ["DiskReader", "read_object"]


class _Read(NamedTuple):
    """A chunk, and the memory that it is read into."""

    key: CacheEngineKey
    chunk: StoredChunk
    obj: MemoryObj


class DiskReader:
    """Reads chunks in threads of its own, into memory of LMCache's CPU pool.

    Every load ends at the first chunk that is missing, damaged, or finds no room in the pool: it
    never waits for memory, as its own chunks may be what fills the pool.

    Args:
        store: this rank's files, for the count of their bytes.
        holdings: where chunks come from.
        pool: where they go; one reference to each is the caller's.
        threads: reads at a time.
        hidden: see `ChunkLayout.tokens`.
    """

    def __init__(
        self,
        store: ChunkStore,
        holdings: Holdings,
        pool: LocalCPUBackend,
        threads: int,
        hidden: int,
    ) -> None:
        self.misses = 0  # chunks that were not asked of the store
        self._store = store
        self._holdings = holdings
        self._pool = pool
        self._hidden = hidden
        self._refusing = False
        self._threads = ThreadPoolExecutor(threads, "disk-read")
        self._pool_full = Complaint(
            "no room in LMCache's CPU pool for a whole load; cut short "
            "(docs: troubleshooting#pool-full)"
        )

    def load(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        """Read the chunks of these keys; returns those before the first miss."""
        reads = self._allocate(keys)
        if len(reads) == 1:  # not worth another thread
            loaded = _prefix([self._fill(reads[0])])
        else:
            loaded = _prefix(list(self._threads.map(self._fill, reads)))
        self._holdings.touch(keys[: len(loaded)])
        return loaded

    async def load_async(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        """`load`, without holding up the event loop that runs it."""
        loop = asyncio.get_running_loop()
        fills = [
            loop.run_in_executor(self._threads, self._fill, read) for read in self._allocate(keys)
        ]
        loaded = _prefix(await asyncio.gather(*fills))
        self._holdings.touch(keys[: len(loaded)])
        return loaded

    def submit(self, key: CacheEngineKey) -> Future[MemoryObj | None]:
        """`load` one chunk in a thread."""
        return self._threads.submit(lambda: next(iter(self.load([key])), None))

    def refuse(self) -> None:
        """Let every load from now on be a miss; those under way go on."""
        self._refusing = True

    def close(self) -> None:
        """Wait for reads under way; those that have not begun are dropped."""
        self.refuse()
        self._threads.shutdown(cancel_futures=True)

    def _allocate(self, keys: Sequence[CacheEngineKey]) -> list[_Read]:
        """Memory for the chunks up to the first that is missing or finds none."""
        reads: list[_Read] = []
        for key in keys if not self._refusing else ():
            if (chunk := self._holdings.find(key)) is None:
                break
            layout = chunk.layout
            obj = self._pool.allocate(
                list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
            )
            if obj is None:
                LOAD_DISK.failed("pool_full")
                self._pool_full.log()
                break
            reads.append(_Read(key, chunk, obj))
        self.misses += len(keys) - len(reads)
        return reads

    def _fill(self, read: _Read) -> MemoryObj | None:
        obj, filled = read.obj, False

        def fill() -> bool:
            return read.chunk.read(memoryview(obj.byte_array).cast("B"))

        try:
            filled = read_object(fill, self._store, read.key, obj, hidden=self._hidden)
        finally:
            if not filled:
                obj.ref_count_down()
        return obj if filled else None


def read_object(
    fill: Callable[[], bool],
    store: ChunkStore,
    key: CacheEngineKey | ObjectKey,
    obj: MemoryObj,
    *,
    hidden: int = 0,
) -> bool:
    """Read a chunk into a memory object of its size, and count that; False on a miss.

    Args:
        fill: reads it, and says whether it was whole.
        store: where the chunk is, or its parts are.
        key: LMCache's.
        obj: after a miss it may hold anything.
        hidden: see `ChunkLayout.tokens`.
    """
    filled = False
    watch = Stopwatch()
    try:
        with watch.running():
            filled = fill()
    finally:
        if not filled:
            DISK_USED_BYTES.set(store.used_bytes)  # a damaged file is gone
    if filled:
        layout = ChunkLayout.of(obj)
        tokens = layout.tokens(hidden) if layout and counts_tokens(key) else 0
        LOAD_DISK.moved(size_bytes=obj.get_size(), tokens=tokens, seconds=watch.seconds)
    return filled


def _prefix(objs: Sequence[MemoryObj | None]) -> list[MemoryObj]:
    """What precedes the first None; drops the references to what follows it."""
    loaded = list(itertools.takewhile(lambda obj: obj is not None, objs))
    for obj in objs[len(loaded) :]:
        if obj is not None:
            obj.ref_count_down()
    return loaded
