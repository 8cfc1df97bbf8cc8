"""The disk tier in LMCache's own engine: a storage plug-in over `ChunkStore`.

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

    put     engine thread. Takes one reference per chunk until its write has ended. Queued writes
            hold at most half of LMCache's CPU pool; what would exceed that is dropped.
    lookup  pins chunks on disk; LMCache unpins them after the load. Pins don't touch memory.
    load    returns chunks with one reference, the caller's, up to the first that is missing,
            damaged or finds no room in the pool; vLLM recomputes the rest. Never waits for memory,
            as its own chunks may be what fills the pool.
    close   ends its writes, which read from the CPU pool: `stock.ending` closes that last.

The name of a chunk in the store, or of one layer of it:

    DEVICE@KV SHAPE@RANKS@RANK@CHUNK HASH@DTYPE@LAYER or -@MODEL <newline> TAGS

LMCache's own text for a key runs tags together, and has neither device nor shape.
"""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lmcache import torch_device_type
from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import LOAD_DISK, Stopwatch
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.disk.writer import DiskWriter
from lmcache_xpu.tiers.pause import Complaint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["DiskTier", "check_hash"]


class DiskTier(StoragePluginInterface):  # type: ignore[misc]  # untyped base
    """Chunks on a local disk, found again after a restart.

    Thread-safe. No method raises into the engine or waits for another request.

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
        self._origin = f"{torch_device_type}@{metadata.kv_shape}"
        self._num_layers = metadata.kv_shape[0]
        self._hidden: int = metadata.kv_shape[3] * metadata.kv_shape[4]
        self._store = settings.open_store(
            metadata.worker_id, metadata.world_size, config.pin_timeout_sec
        )
        half_pool = int(config.max_local_cpu_size * 2**30) // 2
        self._writes = DiskWriter(
            self._store, half_pool, max(1, settings.threads // 2), self._hidden
        )
        self._reads = ThreadPoolExecutor(settings.threads, "disk-read")
        self._pool_full = Complaint(
            "no room in LMCache's CPU pool for a whole load; cut short "
            "(docs: troubleshooting#pool-full)"
        )
        self._closed = False

    @property
    def pending(self) -> int:
        """The number of chunks whose writes have not ended."""
        return len(self._writes.pending)

    def name(self, key: CacheEngineKey) -> str:
        """Name of a chunk in the store, see the module."""
        layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else "-"
        chunk = f"{key.world_size}@{key.worker_id}@{key.chunk_hash_hex}@{key.dtype}@{layer}"
        tags = json.dumps(key.tags, default=str) if key.tags else ""
        return f"{self._origin}@{chunk}@{key.model_name}\n{tags}"

    # Lookup

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` can be loaded; with `pin`, it stays so until `unpin`.

        A pinned chunk is reported even if its file was lost: the scheduler counts on it, and only
        a failing load is passed on. For the first layer of a chunk, asked before a layerwise store,
        all layers must be stored.
        """
        if pin:
            return self.pin(key)
        if isinstance(key, LayerCacheEngineKey) and key.layer_id == 0:
            if self._store.pinned(self.name(key)):
                return True
            return all(self._has(layer) for layer in key.split_layers(self._num_layers))
        return self._has(key)

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

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a write of `key` has not ended yet."""
        return self.name(key) in self._writes.pending

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep `key` from eviction; False if it is not stored."""
        return self._store.pin(self.name(key))

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin back; False if there was none."""
        return self._store.unpin(self.name(key))

    def touch_cache(self) -> None:
        """Nothing to do: loads mark what they use, the start of a prompt as the last used."""

    # Store

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Queue chunks to be written; stored ones are marked as used. LMCache gives no callback."""
        if keys:
            names = [self.name(key) for key in keys]
            self._writes.submit(list(keys), names, objs, self._store.touch(names))

    # Load

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

    # The rest of LMCache's interface

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk, pinned or not, also one that is being written; False if there is none."""
        name = self.name(key)
        self._writes.wait(name)
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
        self._closed = True
        self._writes.close()
        self._reads.shutdown(cancel_futures=True)
        self._store.close()

    def _has(self, key: CacheEngineKey) -> bool:
        name = self.name(key)
        return self._store.pinned(name) or name in self._store

    def _allocate(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        """Allocate memory for the chunks up to the first that is missing or finds none."""
        objs: list[MemoryObj] = []
        for key in keys if not self._closed else ():
            if (layout := self._layout(key)) is None:
                break
            obj = self.local_cpu_backend.allocate(
                list(layout.shapes), list(layout.dtypes), fmt=layout.fmt, busy_loop=False
            )
            if obj is None:
                LOAD_DISK.failed("pool_full")
                self._pool_full.log()
                break
            objs.append(obj)
        return objs

    def _layout(self, key: CacheEngineKey) -> ChunkLayout | None:
        name = self.name(key)
        if (info := self._store.info(name)) is None:
            return None
        layout = ChunkLayout.parse(info.meta)
        if layout is None or layout.size != info.payload_bytes:
            self._store.remove(name)  # of a version that described it otherwise
            return None
        return layout

    def _load(self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj]) -> list[MemoryObj]:
        """Read chunks, and return those before the first miss; references to others are dropped."""
        hits = list(self._reads.map(self._read, keys, objs))
        length = hits.index(False) if False in hits else len(hits)
        for obj in objs[length:]:
            obj.ref_count_down()
        self._store.touch(map(self.name, keys[:length]))
        return objs[:length]

    def _read(self, key: CacheEngineKey, obj: MemoryObj) -> bool:
        watch = Stopwatch()
        with watch.running():
            is_hit = self._store.read(self.name(key), memoryview(obj.byte_array).cast("B"))
        if is_hit and (layout := ChunkLayout.of(obj)):
            layout.count(LOAD_DISK, key, watch, self._hidden)
        return is_hit


def check_hash(algorithm: str) -> None:
    """Raise SettingsError if LMCache's keys would differ after a restart."""
    seeded = os.environ.get("PYTHONHASHSEED", "random") != "random"
    if not seeded and not algorithm.startswith("sha256"):
        raise SettingsError(
            f"pre_caching_hash_algorithm={algorithm!r} without PYTHONHASHSEED",
            "keys that are the same after a restart",
            "Set it to 'sha256', or fix PYTHONHASHSEED.",
        )
