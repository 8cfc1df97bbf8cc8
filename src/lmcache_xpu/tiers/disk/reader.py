"""Reads from the disk tier, into LMCache's CPU pool."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

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

__all__ = ["DiskReader", "read_object"]


class DiskReader:
    """Reads chunks in threads of its own, into memory of LMCache's CPU pool.

    Every load ends at the first chunk that is missing, damaged, or finds no room in the pool: it
    never waits for memory, as its own chunks may be what fills the pool.

    Args:
        store: where chunks come from.
        pool: where they go; one reference to each is the caller's.
        threads: reads at a time.
        hidden: see `ChunkLayout.tokens`.
    """

    def __init__(self, store: ChunkStore, pool: LocalCPUBackend, threads: int, hidden: int) -> None:
        self.misses = 0  # chunks that were not asked of the store
        self._store = store
        self._pool = pool
        self._hidden = hidden
        self._refusing = False
        self._threads = ThreadPoolExecutor(threads, "disk-read")
        self._pool_full = Complaint(
            "no room in LMCache's CPU pool for a whole load; cut short "
            "(docs: troubleshooting#pool-full)"
        )

    def load(self, keys: Sequence[CacheEngineKey], names: list[str]) -> list[MemoryObj]:
        """Read the chunks of these keys; returns those before the first miss."""
        objs = self._allocate(names)
        if len(objs) == 1:  # not worth another thread
            loaded = _prefix([self._fill(keys[0], names[0], objs[0])])
        else:
            loaded = _prefix(list(self._threads.map(self._fill, keys, names, objs)))
        self._store.touch(names[: len(loaded)])
        return loaded

    async def load_async(self, keys: Sequence[CacheEngineKey], names: list[str]) -> list[MemoryObj]:
        """`load`, without holding up the event loop that runs it."""
        loop = asyncio.get_running_loop()
        objs = self._allocate(names)
        fills = [
            loop.run_in_executor(self._threads, self._fill, *chunk)
            for chunk in zip(keys, names, objs, strict=False)  # objects up to the first miss
        ]
        loaded = _prefix(await asyncio.gather(*fills))
        self._store.touch(names[: len(loaded)])
        return loaded

    def submit(self, key: CacheEngineKey, name: str) -> Future[MemoryObj | None]:
        """`load` one chunk in a thread."""
        return self._threads.submit(lambda: next(iter(self.load([key], [name])), None))

    def refuse(self) -> None:
        """Let every load from now on be a miss; those under way go on."""
        self._refusing = True

    def close(self) -> None:
        """Wait for reads under way; those that have not begun are dropped."""
        self.refuse()
        self._threads.shutdown(cancel_futures=True)

    def _allocate(self, names: list[str]) -> list[MemoryObj]:
        """Memory for the chunks up to the first that is missing or finds none."""
        objs: list[MemoryObj] = []
        for name in names if not self._refusing else ():
            info = self._store.info(name)
            if info is None:
                break
            layout = ChunkLayout.parse(info.meta)
            if layout.size != info.payload_bytes:  # of a version that described it otherwise
                self._store.remove(name)
                break
            obj = self._pool.allocate(
                list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
            )
            if obj is None:
                LOAD_DISK.failed("pool_full")
                self._pool_full.log()
                break
            objs.append(obj)
        self.misses += len(names) - len(objs)
        return objs

    def _fill(self, key: CacheEngineKey, name: str, obj: MemoryObj) -> MemoryObj | None:
        filled = False
        try:
            filled = read_object(self._store, key, name, obj, hidden=self._hidden)
        finally:
            if not filled:
                obj.ref_count_down()
        return obj if filled else None


def read_object(
    store: ChunkStore,
    key: CacheEngineKey | ObjectKey,
    name: str,
    obj: MemoryObj,
    *,
    hidden: int = 0,
    is_lent: Callable[[], bool] | None = None,
) -> bool:
    """Read a chunk into a memory object of its size, and count that; False on a miss.

    Args:
        store: where the chunk is.
        key: LMCache's.
        name: its name in the store.
        obj: after a miss it may hold anything.
        hidden: see `ChunkLayout.tokens`.
        is_lent: whether the object may still be written, see `read_chunk`.
    """
    filled = False
    watch = Stopwatch()
    try:
        with watch.running():
            filled = store.read(name, obj.byte_array, is_lent)
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
