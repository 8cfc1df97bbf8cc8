"""LMCache's side of the disk tier: a storage plug-in over `ChunkStore`.

Switched on in LMCache's configuration:

    storage_plugins: ["disk"]
    extra_config:
      storage_plugin.disk.module_path: lmcache_xpu.disk.tier
      storage_plugin.disk.class_name: DiskTier
      disk.path: /var/cache/kv    # each worker uses <path>/kv-worker-<worker id>; in the engines
                                  # of data parallelism from 1 up kv-engine-<N>-worker-<worker id>
      disk.gib: 100               # per worker, as LMCache's own sizes are
      disk.threads: 4             # reads at a time; half as many writes

Who calls what, and which references and pins that leaves (LMCache 0.5.6):

    put     engine thread. Takes one reference per chunk, given back when its write has ended,
            however it ended. Queued writes hold at most half of LMCache's CPU pool; what would
            exceed that is dropped with the rest of its batch, as a suffix is no use without
            what precedes it.
    lookup  pins chunks on disk; LMCache unpins them after the load. Pins don't touch memory.
    load    returns chunks with one reference, the caller's. Never waits for memory: from the
            first chunk that is missing, damaged or finds no room in the pool, the result is
            None (or ends, where it is a list of the loaded ones) and vLLM recomputes.
    close   ends its writes, which read from the CPU pool's memory. LMCache itself would free that
            before; `stock.ending` closes the pool last.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_LIMIT_BYTES, DISK_USED_BYTES
from lmcache_xpu.tiers.chunk_key import engine_origin
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.holdings import Holdings
from lmcache_xpu.tiers.disk.parameters import DiskSettings, check_hash
from lmcache_xpu.tiers.disk.reader import DiskReader
from lmcache_xpu.tiers.disk.writer import DiskWriter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from lmcache_xpu.tiers.disk.counters import Counters

__all__ = ["DiskTier"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only


class DiskTier(StoragePluginInterface):  # type: ignore[misc]  # untyped base
    """Chunks on a local disk, found again after a restart.

    Thread-safe. No method raises into the engine or waits for another request; the threads that
    do the reading and writing end with `close`.

    Raises:
        SettingsError: a `disk.*` setting is wrong, the directory can't be used or is in use,
            LMCache has no CPU pool, or its keys would differ after a restart. (LMCache logs it
            and goes on without the tier; `vllm_connector` then refuses to start.)
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        local_cpu_backend: LocalCPUBackend | None,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if local_cpu_backend is None:
            raise SettingsError(
                f"no CPU pool (max_local_cpu_size {config.max_local_cpu_size}, role "
                f"{metadata.role})",
                "max_local_cpu_size > 0 in a worker: chunks are loaded into that pool",
            )
        check_hash(config.pre_caching_hash_algorithm)
        settings = DiskSettings.parse(config.extra_config or {})
        self._num_layers = metadata.kv_shape[0]
        self._hidden: int = metadata.kv_shape[3] * metadata.kv_shape[4]
        self._store = settings.open_store(
            metadata.worker_id, metadata.world_size, config.pin_timeout_sec
        )
        DISK_LIMIT_BYTES.set(settings.limit_bytes)
        DISK_USED_BYTES.set(self._store.used_bytes)
        half_pool = int(config.max_local_cpu_size * 2**30) // 2
        self._writes = DiskWriter(
            self._store, half_pool, max(1, settings.threads // 2), self._hidden
        )
        self._holdings = Holdings(self._store, engine_origin(metadata))
        self._reads = DiskReader(
            self._store, self._holdings, local_cpu_backend, settings.threads, self._hidden
        )
        self._closed = False

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def pending(self) -> int:
        """The number of chunks whose writes have not ended."""
        return len(self._writes.pending)

    @property
    def counters(self) -> Counters:
        """A snapshot; `dropped` and `misses` include what never reached the disk."""
        counters = self._store.counters
        return replace(
            counters,
            dropped=counters.dropped + self._writes.dropped,
            misses=counters.misses + self._reads.misses,
        )

    # Lookup

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` can be loaded; with `pin`, it stays so until `unpin`.

        A chunk promised to a lookup is still reported while its pin lasts, even if its file was
        lost meanwhile: LMCache has told the scheduler, and only a failing load is passed on. For
        the first layer of a chunk, asked before a layerwise store, all layers must be there.
        """
        if pin:
            return self._holdings.pin(key)
        if isinstance(key, LayerCacheEngineKey) and key.layer_id == 0:
            if self._store.pinned(self._holdings.name(key)):
                return True
            return all(k in self._holdings for k in key.split_layers(self._num_layers))
        return key in self._holdings

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Length of the prefix of `keys` that can be loaded, pinned if `pin`.

        The layers of one chunk count together or not at all: LMCache uses no part of them, and
        would not unpin it.
        """
        length = int(super().batched_contains(keys, pin))
        if pin and length < len(keys) and isinstance(keys[0], LayerCacheEngineKey):
            for key in keys[:length]:
                self.unpin(key)
            return 0
        return length

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """`batched_contains` for any prefix: here LMCache unpins what it can't use."""
        return int(super().batched_contains(keys, pin))

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a write of `key` has not ended yet."""
        return self._holdings.name(key) in self._writes

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep `key` from eviction; False if it is not stored."""
        return self._holdings.pin(key)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin back; False if there was none."""
        return self._holdings.unpin(key)

    def touch_cache(self) -> None:
        """Nothing to do: loads mark what they use, the start of a prompt as the last used."""

    # Store

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> list[Future[None]]:
        """Queue chunks to be written; returns at once, with a future for each that was queued.

        Takes a reference to each until its write has ended. Skips what is stored (and marks it
        as used) or queued; drops what exceeds the bound on the queue, see the module.
        """
        if not keys:
            return []
        names = [self._holdings.name(key) for key in keys]
        used_ns = self._store.touch(names)
        return self._writes.submit(list(keys), names, objs, used_ns, on_complete_callback)

    # Load

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk, with one reference for the caller; None on a miss."""
        return self.batched_get_blocking([key])[0]

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[MemoryObj | None]:
        """`get_blocking` in a thread."""
        return self._reads.submit(key)

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """One entry per key, None from the first miss on; see the module for references."""
        loaded = self._reads.load(keys)
        return [*loaded, *[None] * (len(keys) - len(loaded))]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The chunks of `keys` up to the first miss: a shorter list says that loading failed.

        LMCache calls this in two ways. With a `transfer_spec`, to prefetch what it has just
        looked up: it drops one reference, and leaves the lookup's pins to us. Without, for one
        layer of a layerwise load: the GPU connector holds it until its copy is done.
        """
        loaded = await self._reads.load_async(keys)
        if transfer_spec is not None:
            for key in keys:
                self._holdings.unpin(key)
        return loaded

    # The rest of LMCache's interface

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk, pinned or not, also one that is being written; False if there is none."""
        name = self._holdings.name(key)
        self._writes.settle(name)
        return self._store.remove(name)

    def clear(self) -> int:
        """Remove all that is not pinned; returns its tokens, each layer's where stored so."""
        layouts = [ChunkLayout.parse(info.meta) for info in self._store.clear()]
        return sum(layout.tokens(self._hidden) for layout in layouts if layout is not None)

    def get_allocator_backend(self) -> LocalCPUBackend:
        """LMCache's CPU pool: what is stored comes from it, what is loaded goes to it."""
        return self.local_cpu_backend

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of the directory; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reads.refuse()
        self._writes.close()
        self._reads.close()
        self._store.close()
