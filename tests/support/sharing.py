"""An engine's storage with a shared tier, for its tests."""

from __future__ import annotations

import time

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.storage_manager import StorageManager
from support.storage import (
    CHUNK,
    SHAPE,
    TOKENS,
    EventManager,
    PinMonitor,
    content,
    make_key,
    make_metadata,
)

from lmcache_xpu.launch.engine_arguments import lmcache_config
from lmcache_xpu.launch.settings import Settings


class Engine:
    """What LMCacheEngine does with its storage, on a real StorageManager."""

    def __init__(self, port, pool_chunks=64, metadata=None):
        settings = Settings.load(
            {"model": "m", "chunk_tokens": TOKENS, "remote_url": f"redis://127.0.0.1:{port}"}
        )
        config = LMCacheEngineConfig.from_defaults(**lmcache_config(settings))
        config.max_local_cpu_size = pool_chunks * CHUNK / 2**30
        PinMonitor.GetOrCreate(config)
        self.manager = StorageManager(config, metadata or make_metadata(), EventManager())
        self.backend = self.manager.storage_backends["RemoteBackend-shared"]

    def store(self, numbers):
        self.send(numbers)
        self.wait_until_on_their_way(0)

    def send(self, numbers):
        objs = []
        for number in numbers:
            obj = self.manager.allocate(SHAPE, torch.bfloat16, fmt=MemoryFormat.KV_2LTD)
            obj.tensor.copy_(content(number))
            objs.append(obj)
        self.manager.batched_put([make_key(n) for n in numbers], objs)

    def wait_until_on_their_way(self, number):
        end = time.monotonic() + 10
        while (now := len(self.backend.put_tasks)) > number:
            assert time.monotonic() < end, f"{now} chunks are still on their way"
            time.sleep(0.002)

    def found(self, numbers):
        return self.backend.batched_contains([make_key(n) for n in numbers])

    def load(self, number):
        return self.backend.get_blocking(make_key(number))

    def close(self):
        self.manager.close()
        self.manager.loop.close()
