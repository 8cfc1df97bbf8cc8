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
            before; `cache_engine.storage_manager` closes the pool last.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmcache import torch_device_type
from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import DISK_LIMIT_BYTES, DISK_USED_BYTES, LOAD_DISK, Stopwatch
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.parameters import DiskSettings, check_hash
from lmcache_xpu.tiers.disk.writer import Complaint, DiskWriter, first_layer
from lmcache_xpu.tiers.residency import DISK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from lmcache_xpu.tiers.disk.chunk_store import Counters
    from lmcache_xpu.tiers.residency import Residency

__all__ = ["DiskTier"]


def _prefix(objs: Sequence[MemoryObj | None]) -> list[MemoryObj]:
    """What precedes the first None; drops the references to what follows it."""
    loaded = list(itertools.takewhile(lambda obj: obj is not None, objs))
    for obj in objs[len(loaded) :]:
        if obj is not None:
            obj.ref_count_down()
    return loaded


def _chunk_of(name: str) -> tuple[str, int]:
    """The chunk and the layer that a store's key is of; see `DiskTier._name`."""
    parts = name.split("@")
    layer = parts[6]
    return parts[4], 0 if layer == "-" else int(layer)


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
        # What the same key could stand for with another engine on the same directory. (How the
        # engine packs its blocks is part of the model's name by now: see `engine_facts`.)
        self._origin = f"{torch_device_type}@{metadata.kv_shape}"
        self._num_layers = metadata.kv_shape[0]
        self._hidden = metadata.kv_shape[3] * metadata.kv_shape[4]
        self._store = settings.open_store(
            metadata.worker_id, metadata.world_size, config.pin_timeout_sec
        )
        DISK_LIMIT_BYTES.set(settings.limit_bytes)
        DISK_USED_BYTES.set(self._store.used_bytes)
        half_pool = int(config.max_local_cpu_size * 2**30) // 2
        self._writes = DiskWriter(
            self._store, half_pool, max(1, settings.threads // 2), self._hidden
        )
        self._readers = ThreadPoolExecutor(settings.threads, "disk-read")
        self._unserved = 0
        self._pool_full = Complaint("no room in LMCache's CPU pool for a whole load; cut short")
        self._closed = False

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def counters(self) -> Counters:
        """A snapshot; `dropped` and `misses` include what never reached the disk."""
        counters = self._store.counters
        return replace(
            counters,
            dropped=counters.dropped + self._writes.dropped,
            misses=counters.misses + self._unserved,
        )

    def watch(self, residency: Residency) -> None:
        """Tell of the chunks that are stored, and of each that comes or goes."""

        def changed(name: str, held: bool) -> None:
            chunk, layer = _chunk_of(name)
            residency.changed(DISK, chunk, held, layer)

        self._store.watch(changed)

    # Lookup

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` can be loaded; with `pin`, it stays so until `unpin`.

        A chunk promised to a lookup is still reported while its pin lasts, even if its file was
        lost meanwhile: LMCache has told the scheduler, and only a failing load is passed on. For
        the first layer of a chunk, asked before a layerwise store, all layers must be there.
        """
        name = self._name(key)
        if pin:
            return self._store.pin(name)
        if self._store.pinned(name):
            return True
        if isinstance(key, LayerCacheEngineKey) and key.layer_id == 0:
            return all(self._name(k) in self._store for k in key.split_layers(self._num_layers))
        return name in self._store

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Length of the prefix of `keys` that can be loaded, pinned if `pin`.

        Of the layers of one chunk all or none: LMCache uses no part of them, and would not
        unpin it.
        """
        found = super().batched_contains(keys, pin)
        if pin and found < len(keys) and isinstance(keys[0], LayerCacheEngineKey):
            for key in keys[:found]:
                self.unpin(key)
            return 0
        return int(found)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """As `batched_contains`, for any prefix: here LMCache unpins what it can't use."""
        return int(super().batched_contains(keys, pin))

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a write of `key` has not ended yet."""
        return self._name(key) in self._writes

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep `key` from eviction; False if it is not stored."""
        return self._store.pin(self._name(key))

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin back; False if there was none."""
        return self._store.unpin(self._name(key))

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
        names = [self._name(key) for key in keys]
        self._store.touch(names)
        return self._writes.submit(list(keys), names, objs, on_complete_callback)

    # Load

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The chunk, with one reference for the caller; None on a miss."""
        return self.batched_get_blocking([key])[0]

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[MemoryObj | None]:
        """`get_blocking` in a thread."""
        return self._readers.submit(self.get_blocking, key)

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """One entry per key, None from the first miss on; see the module for references."""
        names = [self._name(key) for key in keys]
        objs = self._allocate(names)
        if len(objs) == 1:  # not worth another thread
            loaded = _prefix([self._fill(keys[0], names[0], objs[0])])
        else:
            loaded = _prefix(list(self._readers.map(self._fill, keys, names, objs)))
        self._store.touch(names[: len(loaded)])
        return [*loaded, *[None] * (len(keys) - len(loaded))]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The chunks of `keys` up to the first miss: a shorter list says that loading failed.

        LMCache calls this in two ways. With a `transfer_spec`, to prefetch what it has just
        looked up: it drops one reference, and leaves the lookup's pins to us. Without, for one
        layer of a layerwise load: the reference goes when the layer is handed over, before its
        copy is done, and a pin on the object lasts until all are (`retrieve_layer` unpins).
        """
        loop = asyncio.get_running_loop()
        names = [self._name(key) for key in keys]
        objs = self._allocate(names)
        fills = [
            loop.run_in_executor(self._readers, self._fill, *chunk)
            for chunk in zip(keys, names, objs, strict=False)  # objects up to the first miss
        ]
        loaded = _prefix(await asyncio.gather(*fills))
        self._store.touch(names[: len(loaded)])
        for name in names if transfer_spec is not None else ():
            self._store.unpin(name)
        for obj in loaded if transfer_spec is None else ():
            obj.pin()
        return loaded

    def _allocate(self, names: list[str]) -> list[MemoryObj]:
        """Memory for the chunks up to the first that is missing or finds none."""
        objs: list[MemoryObj] = []
        for name in names if not self._closed else ():
            info = self._store.info(name)
            if info is None:
                break
            layout = ChunkLayout.parse(info.meta)
            if layout.size != info.payload_bytes:  # of a version that described it otherwise
                self._store.remove(name)
                break
            # Waiting here for memory could be for ever: this load's own chunks may fill the pool.
            obj = self.local_cpu_backend.allocate(
                list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
            )
            if obj is None:
                LOAD_DISK.failed("pool_full")
                self._pool_full.log()
                break
            objs.append(obj)
        self._unserved += len(names) - len(objs)
        return objs

    def _fill(self, key: CacheEngineKey, name: str, obj: MemoryObj) -> MemoryObj | None:
        filled = False
        watch = Stopwatch()
        try:
            with watch.running():
                filled = self._store.read(name, obj.byte_array)
        finally:
            if not filled:
                DISK_USED_BYTES.set(self._store.used_bytes)  # a damaged file is gone
                obj.ref_count_down()
        if not filled:
            return None
        layout = ChunkLayout.of(obj)
        tokens = layout.tokens(self._hidden) if layout and first_layer(key) else 0
        LOAD_DISK.moved(size_bytes=obj.get_size(), tokens=tokens, seconds=watch.seconds)
        return obj

    # The rest of LMCache's interface

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk, pinned or not, also one that is being written; False if there is none."""
        name = self._name(key)
        self._writes.settle(name)
        return self._store.remove(name)

    def clear(self) -> int:
        """Remove all that is not pinned; returns its tokens, each layer's where stored so."""
        layouts = [ChunkLayout.parse(info.meta) for info in self._store.clear()]
        return sum(layout.tokens(self._hidden) for layout in layouts)

    def forget_model(self) -> bool:
        """Remove all chunks of this engine's model, pinned or not, also those being written.

        Returns:
            False if something is still there: a file that can't be removed, or a write that has
            not ended in ten seconds.
        """
        model = f"@{self.metadata.model_name}"

        def is_own(name: str) -> bool:
            text = name.partition("\n")[0]
            return text.startswith(f"{self._origin}@") and text.endswith(model)

        ended = self._writes.cancel(is_own)
        removed = self._store.remove_all(is_own)
        DISK_USED_BYTES.set(self._store.used_bytes)
        return ended and removed

    def get_allocator_backend(self) -> LocalCPUBackend:
        """LMCache's CPU pool: what is stored comes from it, what is loaded goes to it."""
        return self.local_cpu_backend

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of the directory; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._writes.close()
        self._readers.shutdown(cancel_futures=True)
        self._store.close()

    def _name(self, key: CacheEngineKey) -> str:
        """The store's key. (LMCache's own text for a key runs tags together.)"""
        layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else "-"
        tags = json.dumps(key.tags, default=str) if key.tags else ""
        return (
            f"{self._origin}@{key.world_size}@{key.worker_id}@{key.chunk_hash_hex}@{key.dtype}"
            f"@{layer}@{key.model_name}\n{tags}"
        )
