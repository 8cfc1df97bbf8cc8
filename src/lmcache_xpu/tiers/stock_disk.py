"""The disk tier in LMCache's own engine: a storage plug-in over `ChunkStore`.

Switched on in LMCache's configuration:

    storage_plugins: ["disk"]
    extra_config:
      storage_plugin.disk.module_path: lmcache_xpu.tiers.stock_disk
      storage_plugin.disk.class_name: DiskTier
      disk.path: /var/cache/kv    # the engine uses <path>/kv-worker-0
      disk.gib: 100
      disk.threads: 4             # reads at a time; half as many writes

Queued writes take a reference per chunk, and hold at most half of LMCache's CPU pool. A load
returns chunks with one reference, the caller's, up to the first that is missing, damaged or finds
no room in the pool, and never waits for memory, as its own chunks may be what fills the pool: vLLM
recomputes the rest. LMCache closes the pool last, see `stock.worker`.

The name of a chunk in the store, or of one layer of it:

    DEVICE@KV SHAPE@RANKS@RANK@CHUNK HASH@DTYPE@LAYER or -@MODEL <newline>
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lmcache import torch_device_type
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_xpu.metrics import LOAD_DISK
from lmcache_xpu.tiers import complain
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.disk.writer import DiskWriter

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend


class DiskTier(StoragePluginInterface):  # type: ignore[misc]  # untyped base
    """Chunks on a local disk, found again after a restart. Thread-safe.

    Raises SettingsError if a `disk.*` setting is wrong, or the directory can't be used or is in
    use. (LMCache logs it and goes on; the connector then refuses to start.)
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        local_cpu_backend: LocalCPUBackend,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        settings = DiskSettings.parse(config.extra_config or {})
        self._origin = f"{torch_device_type}@{metadata.kv_shape}"
        self._num_layers = metadata.kv_shape[0]
        engine = f"engine-{settings.engine}-" if settings.engine else ""
        self._store = settings.open_store(f"kv-{engine}worker-0")
        half_pool = int(config.max_local_cpu_size * 2**30) // 2
        self._writes = DiskWriter(self._store, half_pool, max(1, settings.threads // 2))
        self._reads = ThreadPoolExecutor(settings.threads, "disk-read")
        self._closed = False

    def name(self, key: CacheEngineKey) -> str:
        """Name of a chunk in the store, see the module."""
        layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else "-"
        chunk = f"{key.world_size}@{key.worker_id}@{key.chunk_hash_hex}@{key.dtype}@{layer}"
        return f"{self._origin}@{chunk}@{key.model_name}\n"

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` can be loaded; a load that finds it evicted since is cut short.

        For the first layer of a chunk, asked before a layerwise store, all layers must be stored.
        """
        is_first = isinstance(key, LayerCacheEngineKey) and key.layer_id == 0
        layers = key.split_layers(self._num_layers) if is_first and not pin else [key]
        return all(self.name(layer) in self._store for layer in layers)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a write of `key` has not ended yet."""
        return self.name(key) in self._writes.pending

    def pin(self, key: CacheEngineKey) -> bool:
        """Whether `key` is stored: what was used last stays longest, and nothing is pinned."""
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Nothing is pinned."""
        return True

    def touch_cache(self) -> None:
        """Loads mark what they use, the start of a prompt as the last used."""

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj], *_: Any, **__: Any
    ) -> None:
        """Queue chunks to be written; stored ones are marked as used. LMCache gives no callback."""
        if keys:
            names = [self.name(key) for key in keys]
            self._writes.submit(list(keys), names, objs, self._store.touch(names))

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk, with one reference for the caller; None on a miss."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """One entry per key, None from the first miss on; see the module for references."""
        loaded = self._load(keys, self._allocate(keys))
        return [*loaded, *[None] * (len(keys) - len(loaded))]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The chunks of one layer, up to the first miss: a shorter list fails the load."""
        return await asyncio.to_thread(self._load, keys, self._allocate(keys))

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk; False if there is none."""
        return self._store.remove(self.name(key))

    def get_allocator_backend(self) -> LocalCPUBackend:
        """LMCache's CPU pool: what is stored comes from it, what is loaded goes to it."""
        return self.local_cpu_backend

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of the directory; idempotent."""
        self._closed = True
        self._writes.close()
        self._reads.shutdown(cancel_futures=True)
        self._store.close()

    def _allocate(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        """Allocate memory for the chunks up to the first that is missing or finds none."""
        objs: list[MemoryObj] = []
        for key in () if self._closed else keys:
            name = self.name(key)
            info = self._store.info(name)
            layout = ChunkLayout.parse(info.meta) if info else None
            if info is None or layout is None or layout.size != info.payload_bytes:
                self._store.remove(name)  # of a version that described it otherwise
                break
            obj = self.local_cpu_backend.allocate(
                list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
            )
            if obj is None:
                LOAD_DISK.failed("pool_full")
                complain(
                    "no room in LMCache's CPU pool for a whole load; cut short "
                    "(docs: troubleshooting#pool-full)"
                )
                break
            objs.append(obj)
        return objs

    def _load(self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj]) -> list[MemoryObj]:
        """Read chunks, and return those before the first miss; references to others are dropped."""
        hits = list(self._reads.map(self._read, keys, objs))
        length = hits.index(False) if False in hits else len(hits)
        for obj in objs[length:]:
            obj.ref_count_down()
        self._store.touch([self.name(key) for key in keys[:length]])
        return objs[:length]

    def _read(self, key: CacheEngineKey, obj: MemoryObj) -> bool:
        begun = time.perf_counter()
        is_hit = self._store.read(self.name(key), memoryview(obj.byte_array).cast("B"))
        if is_hit and (layout := ChunkLayout.of(obj)) is not None:
            layout.count(LOAD_DISK, key, begun)
        return is_hit
