"""LMCache's tiers in the engine's process: its storage manager, asked without a server.

A scheduler and a worker in one process share a cache, by the engine's ID in vLLM's configuration.
So vLLM's engine has to have one worker, in its own process, as vLLM starts it for one device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from lmcache import device_ops
from lmcache.v1.distributed.api import GroupedObjectKeys, ObjectKey
from lmcache.v1.distributed.bitmap_ops.fold import fold_unfold_grouped
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from lmcache_xpu.cache.hit_places import ObjectSlots, needed_chunks
from lmcache_xpu.cache.local_options import CPU, LocalCacheOptions
from lmcache_xpu.cache.protocol import Answer, Skipped, TokenRange
from lmcache_xpu.cache.room import Room, object_layout
from lmcache_xpu.cache.server import LentMemory
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import CPU_LIMIT_BYTES, CPU_USED_BYTES
from lmcache_xpu.tiers import EVICTION_POLICY, EVICTION_WATERMARK
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.transfer.devices import is_host, most_pinned
from lmcache_xpu.transfer.pool_memory import PoolMemory
from lmcache_xpu.versions.lmcache_server import begin_prefetch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RESET_S = 1.0
FLOAT8_MARK = ".fp8"  # behind the salts of chunks in an fp8 tier, which are hexadecimal
LEASE_S = 30  # of memory for a write, as LMCache's server has it; see `launch.cache_server`


class PromptKeys:
    """LMCache's keys of a prompt, to which chunks are added as vLLM hashes them."""

    def __init__(self, model_name: str, salt: str, groups: int) -> None:
        self._names = model_name, salt
        self.by_group: list[list[ObjectKey]] = [[] for _ in range(groups)]  # in order of chunks

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.by_group[0])

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Add chunks, by the hashes of all tokens up to the end of each."""
        model_name, salt = self._names
        for group, keys in enumerate(self.by_group):
            keys += [ObjectKey(name, model_name, 0, group, salt) for name in hashes]


class LocalCache:
    """The tiers of one engine, and a worker's `CachePlaces`. Called by any thread.

    Keys are `TokenRange`s, whose tokens are `PromptKeys`.
    """

    is_sealed = False  # nobody else writes to the memory

    _of_engines: ClassVar[dict[str, Self]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        options: LocalCacheOptions,
        device: torch.device,
        model_name: str,
        alignment: int = 1,  # tokens of which a chunk is a multiple
        engine: int = 0,  # its number among those that share the disk
    ) -> None:
        self.chunk_tokens = -(-options.chunk_tokens // alignment) * alignment
        ChunkLayout.bytes_have_tokens(self.chunk_tokens)
        self.model_name = model_name
        self.is_float8 = options.tier_dtype == "fp8"  # keys say so: exact chunks have others
        self._users = 1  # halves of an engine
        self._device = device
        self._layouts: list[Any] = []
        self._windows: Sequence[int] = ()
        # On CPU nothing is pinned, and LMCache's own allocation does.
        pools = None
        if not is_host(device):
            pools = PoolMemory.bind(device_ops, most_pinned(device) or 0, os.environ)
        adapters = options.adapters(engine)
        self._other_tiers, self.has_other_tiers = tuple(adapters), bool(adapters)
        memory = L1MemoryManagerConfig(int(options.cpu_gib * 2**30), use_lazy=False, shm_name="")
        self._storage = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory, write_ttl_seconds=LEASE_S),
                EvictionConfig(EVICTION_POLICY, EVICTION_WATERMARK),
                L2AdaptersConfig(list(adapters.values())),
                prefetch_policy="retain",  # in memory what came from them
            )
        )
        self._room = Room(self._storage)
        CPU_LIMIT_BYTES.set(self.memory_use()[1])
        address = self._storage.l1_memory_desc.ptr
        self._is_pinned = pools is not None and pools.has_pinned(address)

    @classmethod
    def make(
        cls, config: VllmConfig, options: LocalCacheOptions, device: torch.device, alignment: int
    ) -> Self:
        """Make the cache of an engine, for its worker.

        Raises SettingsError if the engine has several workers, or the disk can't be used.
        """
        parallel = config.parallel_config
        if parallel.world_size > 1:
            raise SettingsError(
                f"an engine of {parallel.world_size} devices, and a cache in its process",
                "one device",
                "Use a server: `lmcache-xpu serve` starts one, with --cache server.",
            )
        name, model = config.kv_transfer_config.engine_id, config.model_config.model
        cache = cls(options, device, model, alignment, parallel.data_parallel_index)
        with cls._making:
            cls._of_engines[name] = cache
        return cache

    @classmethod
    def of_worker(cls, config: VllmConfig) -> Self:
        """Return the cache that an engine's worker has made, for its scheduler.

        Raises SettingsError if the worker is in another process.
        """
        with cls._making:
            cache = cls._of_engines.get(config.kv_transfer_config.engine_id)
            if cache is None:
                raise SettingsError(
                    "a worker in a process of its own, and a cache in the engine's",
                    "vLLM's executor `uni`",
                    "Leave --distributed-executor-backend out. On CPU, `lmcache-xpu serve` sets "
                    "VLLM_ENABLE_V1_MULTIPROCESSING=0 for it. Or use --cache server.",
                )
            cache._users += 1
        return cache

    def register(self, sizes: Sequence[int], windows: Sequence[int]) -> None:
        """Learn what is stored; see `Cache.places`."""
        self._windows = tuple(windows)
        self._layouts = [object_layout(size) for size in sizes]

    def memory(self) -> LentMemory:
        """Return the memory of chunks, pinned where that is possible."""
        pool = self._storage.l1_memory_desc
        return LentMemory.at(pool.ptr, pool.size, self._device, is_pinned=self._is_pinned)

    def memory_use(self) -> tuple[int, int]:
        """Return the bytes of memory in use, and all of it."""
        used, total = self._storage.get_l1_usage()
        return int(used), int(total)

    def listen(self, listener: Callable[[str], Any]) -> None:
        """Have a listener called for what each tier gains and loses, and what is on disk already.

        One of LMCache's is made for each tier, by its name.
        """
        self._room.listen(listener(CPU))
        adapters = [adapter for _, adapter in self._storage.l2_adapters()]
        for tier, adapter in zip(self._other_tiers, adapters, strict=True):
            adapter.register_listener(listener(tier))

    # Look-ups

    def prompt_keys(self, salt: str) -> PromptKeys:
        """Return the keys of a prompt, which has no chunks yet."""
        salt += FLOAT8_MARK if self.is_float8 else ""
        return PromptKeys(self.model_name, salt, max(1, len(self._layouts)))

    def find(self, prompt: PromptKeys, chunks: int, *, in_memory: bool) -> Any:
        """Begin to look for the first chunks of a prompt, and to lock what may be hit.

        `in_memory`: nothing is loaded from other tiers, and `hit_chunks` knows at once.
        """
        return begin_prefetch(self._storage, self._rows(prompt, chunks), in_memory=in_memory)

    def hit_chunks(self, handle: Any) -> int | None:
        """Return the chunks of a hit, once; None while other tiers are read."""
        result = self._storage.query_prefetch_status(handle)
        if result is None:
            return None
        if self.has_other_tiers:
            CPU_USED_BYTES.set(self._storage.get_l1_usage()[0])
        hit, _ = fold_unfold_grouped(result.hit_cells, [each or -1 for each in self._windows])
        return int(hit)

    def attention_chunks(self, prompt: PromptKeys, chunks: int) -> int:
        """Return the first chunks that memory has of all groups of whole attention."""
        rows = [row for row in self._rows(prompt, chunks) if not self._windows[row.object_group_id]]
        if not rows:
            return 0
        handle = begin_prefetch(self._storage, rows, in_memory=True)
        cells = self._storage.query_prefetch_status(handle).hit_cells
        shared, _ = fold_unfold_grouped(cells, [-1] * len(rows))
        self._room.unlock([key for row in rows for key in row.keys[:shared]])
        return int(shared)

    def unlock(self, prompt: PromptKeys, hit: int, first: int, last: int) -> None:
        """Let chunks from `first` up to `last`, of a hit of so many, be evicted again."""
        needed = needed_chunks(hit, self._windows)
        keys: list[ObjectKey] = []
        for of_group, chunks in zip(prompt.by_group, needed, strict=True):
            keys += of_group[max(first, chunks.start) : min(last, chunks.stop)]
        self._room.unlock(keys)

    # A worker's questions, see `CachePlaces`

    def locate(self, number: int, key: TokenRange) -> Answer[ObjectSlots | None]:
        """Return where the chunks of a hit are, locked until `release`; None if one is missing."""
        first, last = key.start // self.chunk_tokens, key.end // self.chunk_tokens
        prompt = [keys[:last] for keys in key.tokens.by_group]
        rows = self._room.locate(number, prompt, first, needed_chunks(last - first, self._windows))
        return Answer(None if rows is None else ObjectSlots(sorted(rows)))

    def release(self, number: int, key: TokenRange | None = None) -> None:
        """Unlock what a question has located; nothing of it is read any more."""
        self._room.release(number)

    def reserve(self, number: int, key: TokenRange, skipped: Skipped) -> Answer[ObjectSlots]:
        """Return where to store chunks that are not there, as far as there is room."""
        first, last = key.start // self.chunk_tokens, key.end // self.chunk_tokens
        prompt = [keys[:last] for keys in key.tokens.by_group]
        rows = self._room.reserve(number, prompt, first, skipped, self._layouts)
        return Answer(ObjectSlots(sorted(rows)))

    def commit(self, number: int, key: TokenRange | None = None) -> Answer[bool]:
        """Publish chunks that are written; whether they were reserved."""
        is_published = self._room.commit(number)
        CPU_USED_BYTES.set(self._storage.get_l1_usage()[0])
        return Answer(is_published)

    def give_up(self, number: int) -> None:
        """Forget a store that failed."""
        self._room.give_up(number)

    def leave(self) -> None:
        """Do nothing: the worker's half closes the cache."""

    # The end

    def reset(self) -> bool:
        """Remove all that the engine has stored; whether nothing is left.

        Called by the engine's thread, once no transfer runs. Chunks that are loaded later
        stay, as far as they are locked; nothing finds them by the keys of another epoch.
        """
        adapters = [each for _, each in self._storage.l2_adapters() if hasattr(each, "forget")]
        self._storage.clear()
        gone = [adapter.forget(self.model_name) for adapter in adapters]
        deadline = time.monotonic() + RESET_S  # LMCache unlocks what it has written to a disk
        while self.memory_use()[0] and time.monotonic() < deadline:
            self._storage.clear()
            time.sleep(0.05)
        CPU_USED_BYTES.set(self.memory_use()[0])
        return all([*gone, *(adapter.forget(self.model_name) for adapter in adapters)])

    def close(self) -> None:
        """End one half's use of the cache; the last one ends the cache."""
        with self._making:
            self._users -= 1
            if self._users:
                return
            for name in [name for name, cache in self._of_engines.items() if cache is self]:
                del self._of_engines[name]
        self._storage.close()

    def _rows(self, prompt: PromptKeys, chunks: int) -> list[GroupedObjectKeys]:
        """Return LMCache's names of the first chunks of a prompt, by KV cache group."""
        return [
            GroupedObjectKeys(keys[:chunks], group, layout, window or -1)
            for group, (keys, layout, window) in enumerate(
                zip(prompt.by_group, self._layouts, self._windows, strict=True)
            )
        ]
