"""The disk tier in LMCache's server: an L2 adapter over `ChunkStore`.

Switched on by an option of `lmcache server`, whose value `disk_option` writes:

    --l2-adapter '{"type": "plugin", "module_path": "lmcache_xpu.disk.l2_adapter",
                   "class_name": "DiskL2Adapter",
                   "adapter_params": {"disk.path": "/var/cache/kv", "disk.gib": 100}}'

Who calls what (LMCache 0.5.6 and 0.5.7rc2), and whose the memory is:

    store    the store controller's thread. Queued writes hold at most half of the server's L1.
             Written bytes count only if the memory was lent to the end.
    look-up  the prefetch controller's thread. Marks files as used, so others are evicted first.
    load     the same, into memory that is lent for a time: it is checked before each slice goes
             there. A miss of one object does not end the load: LMCache cuts the hit itself.
    close    after the controllers, before L1's memory is freed: waits for reads and writes of it.

Nothing raises into the server or waits for the disk there: tasks run in threads.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from lmcache_xpu.metrics import LOAD_DISK, Stopwatch
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.disk.server_objects import ServerObjects, object_key, object_name
from lmcache_xpu.tiers.disk.writer import DiskWriter
from lmcache_xpu.tiers.task_results import Task, TaskAnswers, after_all

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache.v1.distributed.api import MemoryLayoutDesc, MemoryTags, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["DiskL2Adapter"]

logger = logging.getLogger("vllm.lmcache_xpu.disk")  # vLLM prints its own loggers only

_QUEUE_BYTES = 1 << 30  # of writes, where L1's size is not known


class DiskL2Adapter(TaskAnswers, L2AdapterInterface):  # type: ignore[misc]  # untyped base
    """Objects of LMCache's server on a local disk, found again after a restart.

    Thread-safe. One server for each directory.

    Args:
        params: the option's `adapter_params`, see `disk_option`.
        l1_memory_desc: the server's memory.

    Raises:
        SettingsError: a setting is wrong, or the directory can't be used or is in use. The server
            does not start then.
    """

    def __init__(
        self, params: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        settings = DiskSettings.parse(params, alone=True)
        super().__init__(max_capacity_bytes=settings.limit_bytes)
        self._store = settings.open_store(
            f"kv-server-{settings.engine}" if settings.engine else "kv-server"
        )
        queue_bytes = l1_memory_desc.size // 2 if l1_memory_desc else _QUEUE_BYTES
        self._writes = DiskWriter(self._store, queue_bytes, max(1, settings.threads // 2))
        self._reads = ThreadPoolExecutor(settings.threads, "disk-read")
        # What reads or changes the index alone, or queues writes, in the order of its submission.
        self._looks = ThreadPoolExecutor(1, "disk-look-up")
        self._objects = ServerObjects(self._store)
        self._reporting = threading.Lock()

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue objects to be written; what exceeds the bound on the queue is dropped."""
        task = self._stored.begin()
        # After the touches before it, which say when the chunks of its prompt count as used.
        self._looks.submit(self._begin_store, task, keys, objects)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The tasks that have ended, successful if all of their objects are on the disk."""
        self._looks.submit(self._report)
        return self._stored.take_all()

    # Look-up

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look for objects that have their group's layout, and to mark them as used."""
        task = Task(self._located, len(keys))
        self._looks.submit(self._locate, task, keys, group_layout_descs)
        return task.number

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Report a damaged file that a load has removed; nothing is locked."""
        self._looks.submit(self._report)

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Begin to mark objects as used, without moving their bytes."""
        self._looks.submit(self._touch, keys)

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to read objects into memory of their layouts."""
        task = Task(self._loaded, len(keys))
        reads = [
            self._reads.submit(self._read, task, index, key, obj)
            for index, (key, obj) in enumerate(zip(keys, objects, strict=True))
        ]
        after_all(reads, task.end)
        return task.number

    # The rest of LMCache's interface

    def get_memory_tags(self) -> MemoryTags:
        """A disk of this host. LMCache 0.5.7 asks; 0.5.6 has no such names."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL)

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        """Take LMCache's name of this tier, and report the objects on the disk."""
        super().set_backend_identity(name, shared)
        self._report()

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Report the objects on the disk to a listener, and later each change."""
        with self._reporting:
            super().register_listener(listener)
            if sizes := self._objects.sizes:
                listener.on_l2_keys_stored(list(sizes), list(sizes.values()))

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects; LMCache's own eviction calls it, where one is set up."""
        for key in keys:
            self._store.remove(object_name(key))
        self._report()

    def forget(self, model_name: str) -> bool:
        """Remove all objects of a model, also those being written; False if one is left."""

        def is_meant(name: str) -> bool:
            key = object_key(name)
            return key is None or key.model_name == model_name

        self._looks.submit(lambda: None).result()  # stores that have not begun
        ended = self._writes.cancel(is_meant)
        gone = self._store.remove_all(is_meant)
        self._report()
        return ended and gone

    def get_usage(self) -> AdapterUsage:
        """The bytes of the files, as the file system counts them, and the bound."""
        self._report()
        return super().get_usage()

    def report_status(self) -> dict[str, Any]:
        """What the server's status page shows."""
        counters = self._store.counters
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "directory": str(self._store.directory),
            "limit_bytes": self._max_capacity_bytes,
            "pending": len(self._writes.pending),
            **counters,
            "dropped": counters["dropped"] + self._writes.dropped,
        }

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of memory and directory."""
        self._looks.shutdown()
        self._writes.close()
        self._reads.shutdown(cancel_futures=True)
        self._close_results()
        self._store.close()

    # In threads

    def _begin_store(self, task: int, keys: list[ObjectKey], objects: list[MemoryObj]) -> None:
        names = [object_name(key) for key in keys]
        stored, new_bytes, writes = [], 0, []

        def end() -> None:
            complete = all(name in self._store for name in names)
            self._stored.end(task, L2StoreResult(complete, new_bytes if complete else 0))

        try:
            for name, obj in zip(names, objects, strict=True):
                info, layout = self._store.info(name), ChunkLayout.of(obj)
                if info and layout and info.meta != layout.text:
                    self._store.remove(name)  # an engine of another layout has stored it
                    info = None
                if info:
                    stored.append(name)
                else:
                    new_bytes += obj.get_size()
            self._writes.submit(keys, names, objects, self._store.now(len(keys)))
            writes = [write for name in names if (write := self._writes.pending.get(name))]
        finally:
            after_all(writes, end)
        self._store.touch(stored)

    def _locate(
        self, task: Task, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]
    ) -> None:
        held = []
        try:
            for index, key in enumerate(keys):
                layout = layouts.get(key.object_group_id)
                info = self._store.info(object_name(key))
                if info and (layout is None or _has_layout(info.meta, layout)):
                    task.hit(index)
                    held.append(key)
        finally:
            task.end()
        self._touch(held)

    def _touch(self, keys: list[ObjectKey]) -> None:
        # The parts of a chunk, of all groups and ranks, are used together.
        chunks: dict[bytes, int] = {}
        keys = sorted(keys, key=lambda key: chunks.setdefault(key.chunk_hash, len(chunks)))
        self._store.touch([object_name(key) for key in keys])
        if keys:
            self._notify_keys_accessed(keys)

    def _read(self, task: Task, index: int, key: ObjectKey, obj: MemoryObj) -> None:
        watch = Stopwatch()
        try:
            name, layout = object_name(key), ChunkLayout.of(obj)
            info = self._store.info(name)
            if info is None or layout is None or info.meta != layout.text:
                return
            with watch.running():
                is_hit = self._store.read(name, obj.byte_array, obj.is_valid)
            if is_hit:
                task.hit(index)
                layout.count(LOAD_DISK, key, watch)
        except Exception as error:
            LOAD_DISK.failed(type(error).__name__)
            logger.exception("disk tier: a load failed (docs: troubleshooting#disk-load)")

    def _report(self) -> None:
        """Report new and removed objects: LMCache counts bytes, also by salt, for its quotas."""
        with self._reporting:
            new, gone = self._objects.changes()
            if gone:
                self._notify_keys_deleted(list(gone), list(gone.values()))
            if new:
                self._notify_keys_stored(list(new), list(new.values()))


def _has_layout(text: str, layout: MemoryLayoutDesc) -> bool:
    """Whether `text`, as `ChunkLayout.text` wrote it, names these shapes and dtypes."""
    stored = ChunkLayout.parse(text)
    if stored is None:  # of another version
        return False
    return stored.shapes == tuple(layout.shapes) and stored.dtypes == tuple(layout.dtypes)
