"""The disk tier as LMCache's server has it: an L2 adapter, made from the server's own option.

Two ways: `Adapter` alone, with memory of LMCache's L1, and `Storage`, which is all that the server
keeps objects with, its controllers included.
"""

from __future__ import annotations

import json
import select

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import L1MemoryManagerConfig, parse_args
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.platform import consume_fd
from support.chunk_files import file_of
from support.until import until

from lmcache_xpu.tiers import disk_option
from lmcache_xpu.tiers.chunk_layout import object_name

SHAPE = torch.Size([2, 2, 16, 128])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
OBJECT = SHAPE.numel() * 2  # 16 KiB
FILE = OBJECT + 4096
L1_OBJECTS = 64


def make_key(number, **changes):
    fields = {
        "chunk_hash": number.to_bytes(32, "big"),
        "model_name": "a/model",
        "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0),
    }
    return ObjectKey(**(fields | changes))


def content(number, layout=LAYOUT):
    """The bytes of object `number`, as a tensor of its layout's only shape."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(layout.shapes[0], generator=generator).to(layout.dtypes[0])


def options(path, files, *, threads=None, l1_objects=L1_OBJECTS, **more):
    """The server's options: room for so many files, and for so many objects in L1."""
    option = json.loads(disk_option(path, files * FILE / 2**30)) | more
    if threads is not None:
        option["adapter_params"]["disk.threads"] = threads
    return [
        *("--l1-size-gb", str(l1_objects * OBJECT / 2**30), "--no-l1-use-lazy"),
        *("--eviction-policy", "LRU"),
        *("--l2-adapter", json.dumps(option)),
    ]


class Adapter:
    """The adapter that LMCache makes of the option, with memory to store from and to load to."""

    def __init__(self, path, files=1000, **settings):
        config = parse_args(options(path, files, **settings))
        memory = L1MemoryManagerConfig(L1_OBJECTS * OBJECT, use_lazy=False, shm_name="")
        self.l1 = L1MemoryManager(memory)
        [option] = config.l2_adapter_config.adapters
        self.tier = create_l2_adapter(option, self.l1.get_l1_memory_desc())
        self.tier.set_backend_identity("plugin")
        self.lent = []

    def allocate(self, count=1, layout=LAYOUT):
        _, objects = self.l1.allocate(layout, count)
        assert len(objects) == count
        self.lent += objects
        return objects

    def filled(self, numbers, layout=LAYOUT):
        objects = self.allocate(len(numbers), layout)
        for number, obj in zip(numbers, objects, strict=True):
            obj.tensor.copy_(content(number, layout))
        return objects

    def store(self, numbers, layout=LAYOUT, **changes):
        """What the store controller hears of these objects."""
        keys = [make_key(n, **changes) for n in numbers]
        objects = self.filled(numbers, layout)
        result = self.submit_store(keys, objects)
        self.l1.free(objects)
        return result

    def submit_store(self, keys, objects):
        task = self.tier.submit_store_task(keys, objects)
        return self.wait(
            self.tier.get_store_event_fd(), lambda: self.tier.pop_completed_store_tasks().get(task)
        )

    def look_up(self, numbers, layout=LAYOUT, **changes):
        """Which of these objects are there; they stay pinned."""
        keys = [make_key(n, **changes) for n in numbers]
        layouts = dict.fromkeys([key.object_group_id for key in keys], layout)
        task = self.tier.submit_lookup_and_lock_task(keys, layouts)
        bits = self.wait(
            self.tier.get_lookup_and_lock_event_fd(),
            lambda: self.tier.query_lookup_and_lock_result(task),
        )
        return [n for index, n in enumerate(numbers) if bits.test(index)]

    def load(self, numbers, layout=LAYOUT, *, objects=None, **changes):
        """Which of these objects come back, with their bytes compared; unlocks them."""
        keys = [make_key(n, **changes) for n in numbers]
        objects = objects or self.allocate(len(numbers), layout)
        for obj in objects:
            obj.tensor.zero_()
        task = self.tier.submit_load_task(keys, objects)
        bits = self.wait(self.tier.get_load_event_fd(), lambda: self.tier.query_load_result(task))
        self.tier.submit_unlock(keys)
        loaded = [n for index, n in enumerate(numbers) if bits.test(index)]
        for number, obj in zip(numbers, objects, strict=True):
            assert number not in loaded or torch.equal(obj.tensor, content(number, layout))
        self.l1.free([obj for obj in objects if obj.is_valid()])
        return loaded

    def wait(self, fd, query):
        """What the controllers do: wait for the descriptor, then ask."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while (result := query()) is None:
            assert poller.poll(10_000), "the task did not end"
            consume_fd(fd)
        return result

    @property
    def store_(self):
        return self.tier._store

    def file(self, number, **changes):
        return file_of(self.store_, object_name(make_key(number, **changes)))

    def settle(self):
        """Wait until what was submitted without a result is done."""
        self.tier._looks.submit(lambda: None).result(10)

    def restarted(self, start, **settings):
        self.tier.close()
        return start(**settings)

    def close(self):
        self.tier.close()
        assert {obj.get_ref_count() for obj in self.lent} <= {1}  # LMCache's own
        self.l1.free([obj for obj in self.lent if obj.is_valid()])
        self.l1.close()


class Storage:
    """LMCache's StorageManager, as the server makes it of its options."""

    def __init__(self, path, files=1000, **settings):
        self.manager = StorageManager(parse_args(options(path, files, **settings)))
        self.closed = False

    @property
    def tier(self):
        [(_, adapter)] = self.manager.l2_adapters()
        return adapter

    def store(self, numbers, *, wait=True):
        keys = [make_key(n) for n in numbers]
        reserved = self.manager.reserve_write(keys, LAYOUT)
        for number, key in zip(numbers, keys, strict=True):
            reserved[key].tensor.copy_(content(number))
        self.manager.finish_write(keys)
        if wait:
            until(lambda: all(object_name(key) in self.tier._store for key in keys))

    def hit(self, numbers):
        """Length of the prefix that comes back, its bytes compared, as a request does."""
        keys = [make_key(n) for n in numbers]
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, 10), "the look-up did not end"
        length = self.manager.query_prefetch_status(handle).hit_cells[0].popcount()
        if length:
            with self.manager.read_prefetched_results(keys[:length]) as objects:
                for number, obj in zip(numbers, objects, strict=False):
                    assert torch.equal(obj.tensor, content(number))
            self.manager.finish_read_prefetched(keys[:length])
        return length

    def clear(self):
        """Empty L1, once nothing of it is being stored."""

        def is_empty():
            self.manager.clear()
            return not self.manager._l1_manager._objects

        until(is_empty)

    def close(self):
        if not self.closed:
            self.closed = True
            self.manager.close()
