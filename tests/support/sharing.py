"""The shared tier as LMCache's server has it: an L2 adapter, made from the server's own option.

Two ways: `Engine` alone, with memory of LMCache's L1, and `Storage`, which is all that a server
keeps objects with, its controllers included.
"""

from __future__ import annotations

from lmcache.v1.distributed.config import L1MemoryManagerConfig, parse_args
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_manager import StorageManager
from support import server_disk
from support.server_disk import FILE, L1_OBJECTS, LAYOUT, OBJECT, make_key
from support.until import until

from lmcache_xpu.tiers import disk_option, shared_option
from lmcache_xpu.tiers.shared_values import value_name


def options(port, disk=None, l1_objects=L1_OBJECTS):
    """The server's options, with a disk tier of a thousand files where there is a directory."""
    tiers = [] if disk is None else [disk_option(disk, 1000 * FILE / 2**30)]
    tiers.append(shared_option(f"redis://127.0.0.1:{port}"))
    return [
        *("--l1-size-gb", str(l1_objects * OBJECT / 2**30), "--no-l1-use-lazy"),
        *("--eviction-policy", "LRU", "--l2-prefetch-policy", "retain"),
        *(word for tier in tiers for word in ("--l2-adapter", tier)),
    ]


def name_of(number, layout=LAYOUT, **changes):
    return value_name(make_key(number, **changes), layout)


class Engine(server_disk.Adapter):
    """The adapter that LMCache makes of the option, with memory to store from and to load to."""

    def __init__(self, port, l1_objects=L1_OBJECTS):
        [option] = parse_args(options(port)).l2_adapter_config.adapters
        memory = L1MemoryManagerConfig(l1_objects * OBJECT, use_lazy=False, shm_name="")
        self.l1 = L1MemoryManager(memory)
        self.tier = create_l2_adapter(option, self.l1.get_l1_memory_desc())
        self.tier.set_backend_identity("plugin", shared=True)
        self.lent = []
        self._results = {}

    def send(self, numbers):
        """Begin to store; return the task and its objects."""
        objects = self.filled(numbers)
        return self.tier.submit_store_task([make_key(n) for n in numbers], objects), objects

    def sent(self, task, objects):
        """The result of what `send` began."""

        def result():
            self._results |= self.tier.pop_completed_store_tasks()
            return self._results.pop(task, None)

        stored = self.wait(self.tier.get_store_event_fd(), result)
        self.l1.free(objects)
        return stored


class Storage(server_disk.Storage):
    """LMCache's StorageManager, as the server makes it of its options."""

    def __init__(self, server, disk=None, l1_objects=L1_OBJECTS):
        config = parse_args(options(server.port, disk, l1_objects))
        config.l1_manager_config.memory_config.shm_name = ""  # of several in one process
        self.manager = StorageManager(config)
        self.closed = False
        self._server = server

    def store(self, numbers, *, wait=True):
        super().store(numbers, wait=False)
        if wait:
            names = [name_of(number) for number in numbers]
            until(lambda: self._server.client.exists(*names) == len(names))
