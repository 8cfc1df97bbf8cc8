"""The disk tier in LMCache's server: an L2 adapter over `ChunkStore`.

Switched on by an option of `lmcache server`, whose value `disk_option` writes.

Queued writes hold at most half of the server's L1. Memory is lent for a time: what was written from
memory that was taken back is dropped, and before each slice of a load it is asked whether that may
still go there. A look-up marks files as used, so others are evicted first. LMCache cuts a hit where
an object is missed, and closes a tier before it frees L1's memory.

Nothing raises into the server or waits for the disk there: tasks run in threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.metrics import LOAD_DISK
from lmcache_xpu.tiers import LOGGERS
from lmcache_xpu.tiers.chunk_layout import ChunkLayout, object_key, object_name
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.disk.writer import DiskWriter
from lmcache_xpu.tiers.task_results import NUMBERS, Task, TaskAnswers, after_all

logger = LOGGERS["disk"]


class DiskL2Adapter(TaskAnswers, L2AdapterInterface):  # type: ignore[misc]  # untyped base
    """Objects of LMCache's server on a local disk, found again after a restart. Thread-safe.

    Raises SettingsError, and the server does not start, if one of the option's `adapter_params` is
    wrong, or the directory can't be used or is in use: one server for each.
    """

    RESIDENCY = "LOCAL"

    def __init__(
        self, params: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        settings = DiskSettings.parse(params, alone=True)
        super().__init__(settings.threads, l1_memory_desc)
        self._limit_bytes = settings.limit_bytes
        number = f"-{settings.engine}" if settings.engine else ""
        self._store = settings.open_store(f"kv-server{number}")
        writers = max(1, settings.threads // 2)
        self._writes = DiskWriter(self._store, self._memory_bytes // 2, writers)
        # What reads or changes the index alone, or queues writes, in the order of its submission.
        self._looks = ThreadPoolExecutor(1, "disk-look-up")
        # The store reports changes while it is locked, so LMCache can't be told there and then.
        self._changed: deque[str] = deque()
        self._store.watch(self._changed.append)
        self._reporting = threading.Lock()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue objects to be written; what exceeds the bound on the queue is dropped."""
        task = next(NUMBERS)
        # After the touches before it, which say when the chunks of its prompt count as used.
        self._looks.submit(self._begin_store, task, keys, objects)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The tasks that have ended, successful if all of their objects are on the disk."""
        self._looks.submit(self._report)
        return self._stored.take_all()

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

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to read objects into memory of their layouts."""
        return self._begin_load(Task(self._loaded, len(keys)), keys, objects)

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Report the objects on the disk, and later each change."""
        super().register_listener(listener)
        self._store.watch(self._changed.append)
        self._report()

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects."""
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

    def report_status(self) -> dict[str, Any]:
        """What the server's status page shows."""
        counters = self._store.counters
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "directory": str(self._store.directory),
            "limit_bytes": self._limit_bytes,
            "pending": len(self._writes.pending),
            **counters,
            "dropped": counters["dropped"] + self._writes.dropped,
        }

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of memory and directory."""
        self._looks.shutdown()
        self._writes.close()
        self._end_loads()
        self._store.close()

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
                if name in self._store:
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
                info = self._store.info(object_name(key))
                layout = layouts.get(key.object_group_id)
                if info and (layout is None or ChunkLayout.is_of(info.meta, layout)):
                    task.hit(index)
                    held.append(key)
        finally:
            task.end()
        self._report()  # what an earlier run left, and is known from now on
        self._touch(held)

    def _touch(self, keys: list[ObjectKey]) -> None:
        # The parts of a chunk, of all groups and ranks, are used together.
        chunks: dict[bytes, int] = {}
        keys = sorted(keys, key=lambda key: chunks.setdefault(key.chunk_hash, len(chunks)))
        self._store.touch([object_name(key) for key in keys])
        if keys:
            self._notify_keys_accessed(keys)

    def _load(self, task: Task, index: int, key: ObjectKey, obj: MemoryObj) -> None:
        try:
            name, layout = object_name(key), ChunkLayout.of(obj)
            info = self._store.info(name)
            if info is None or layout is None or info.meta != layout.text:
                return
            begun = time.perf_counter()
            if self._store.read(name, obj.byte_array, obj.is_valid):
                task.hit(index)
                layout.count(LOAD_DISK, key, begun)
        except Exception as error:
            LOAD_DISK.failed(type(error).__name__)
            logger.exception("disk tier: a load failed (docs: troubleshooting#disk-load)")

    def _report(self) -> None:
        """Report new and removed objects, of no size: LMCache's quotas don't count this tier."""
        with self._reporting:
            names = {self._changed.popleft(): None for _ in range(len(self._changed))}
            keys = [(key, name in self._store) for name in names if (key := object_key(name))]
            for held in (False, True):
                if some := [key for key, is_held in keys if is_held == held]:
                    notify = self._notify_keys_stored if held else self._notify_keys_deleted
                    notify(some, [0] * len(some))
