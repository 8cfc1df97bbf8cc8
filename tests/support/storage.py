"""LMCache's own StorageManager, CPU pool, keys and memory objects, small enough for tests."""

from __future__ import annotations

import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager
from support.chunk_files import file_of

from lmcache_xpu.versions.lmcache import in_process_module

EventManager = in_process_module("v1.event_manager").EventManager
PinMonitor = in_process_module("v1.pin_monitor").PinMonitor

LAYERS, TOKENS, HEADS, DIM = 2, 16, 2, 64
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])  # 16 KiB in bfloat16
CHUNK = SHAPE.numel() * 2
LAYER_SHAPE = torch.Size([TOKENS, 2, HEADS * DIM])
POOL_CHUNKS = 64  # 1 MiB


def make_config(path, *, chunks=1000, pool_chunks=POOL_CHUNKS, hot=False, **extra):
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=hot,
        max_local_cpu_size=pool_chunks * CHUNK / 2**30,
        pre_caching_hash_algorithm="sha256_cbor",
        storage_plugins=["disk"],
        extra_config={
            "storage_plugin.disk.module_path": "lmcache_xpu.tiers.stock_disk",
            "storage_plugin.disk.class_name": "DiskTier",
            "disk.path": str(path),
            "disk.gib": chunks * (CHUNK + 4096) / 2**30,
            **extra,
        },
    )
    PinMonitor.GetOrCreate(config)
    return config


def make_metadata(worker=0, world=1):
    return LMCacheMetadata(
        model_name="a/model",
        world_size=world,
        local_world_size=world,
        worker_id=worker,
        local_worker_id=worker,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, TOKENS, HEADS, DIM),
        role="worker",
        chunk_size=TOKENS,
    )


def make_key(number, **changes):
    fields = {
        "model_name": "a/model",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": number,
        "dtype": torch.bfloat16,
    }
    return CacheEngineKey(**(fields | changes))


class Engine:
    """What LMCacheEngine does with its storage, on a real StorageManager."""

    def __init__(self, path, metadata=None, **settings):
        self.config = make_config(path, **settings)
        self.manager = StorageManager(self.config, metadata or make_metadata(), EventManager())
        self.pool = self.manager.local_cpu_backend
        self.tier = self.manager.storage_backends.get("disk")
        # All that was ever allocated: a lost reference would else be mended by the collector.
        self.lent = []
        self.pool.allocate = self._remember(self.pool.allocate)
        self.pool.batched_allocate = self._remember(self.pool.batched_allocate)

    def _remember(self, allocate):
        def remembering(*args, **kwargs):
            allocated = allocate(*args, **kwargs)
            self.lent += (
                allocated if isinstance(allocated, list) else [allocated] if allocated else []
            )
            return allocated

        return remembering

    def close(self):
        if not self.manager.loop.is_closed():
            if self.tier is not None:
                self.tier.close()  # which still writes from the pool's memory
            self.manager.close()
            self.manager.loop.close()  # LMCache leaves that to the end of the process

    def allocate(self, content, shape=SHAPE, fmt=MemoryFormat.KV_2LTD):
        obj = self.manager.allocate(shape, torch.bfloat16, fmt=fmt, busy_loop=False)
        obj.tensor.copy_(content)
        return obj

    def store(self, numbers, wait=True):
        keys = [make_key(n) for n in numbers]
        self.manager.batched_put(keys, [self.allocate(content(n)) for n in numbers])
        if wait:
            self.settle()
        return keys

    def settle(self):
        deadline = time.monotonic() + 10
        while self.tier._writes.pending:
            assert time.monotonic() < deadline, "a write did not end"
            time.sleep(0.002)

    def load(self, numbers):
        """Which chunks come back, their content checked, references dropped."""
        objs = self.manager.batched_get([make_key(n) for n in numbers], location="disk")
        loaded = []
        for number, obj in zip(numbers, objs, strict=True):
            if obj is not None:
                assert torch.equal(obj.tensor, content(number))
                assert obj.meta.fmt is MemoryFormat.KV_2LTD
                loaded.append(number)
                obj.ref_count_down()
        return loaded

    @property
    def counters(self):
        return self.tier._store.counters

    @property
    def dropped(self):
        return self.counters["dropped"] + self.tier._writes.dropped

    @property
    def pool_in_use(self):
        return self.pool.memory_allocator.pin_allocator.total_allocated_size

    def file(self, number):
        store = self.tier._store
        return file_of(store, self.tier.name(make_key(number)))


def content(number, shape=SHAPE):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)
