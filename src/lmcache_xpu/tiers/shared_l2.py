"""The shared tier in LMCache's server: an L2 adapter over a Valkey or Redis that engines share.

Switched on by an option of `lmcache server`, whose value `shared_option` writes.

The server may be away, slow, full or empty at any time, may evict between a look-up and its load,
and its values may be damaged: then an object is not found, or not kept. After an error, or a
look-up or a load that takes too long in all, the server is left alone for some seconds, as a
request would wait for each attempt.

Memory is lent until a task ends, or taken back sooner: it is checked before a value is sent, and
before each slice is written. Nothing raises into LMCache or waits for the server there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from redis.exceptions import OutOfMemoryError, ResponseError

from lmcache_xpu.metrics import LOAD_SHARED, STORE_SHARED
from lmcache_xpu.tiers import complain
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.shared_values import SharedValues, fill, value_name
from lmcache_xpu.tiers.task_results import NUMBERS, Task, TaskAnswers

LOOKUP_S = 1.0  # in all, for which a request may wait
LOAD_S = 8.0  # likewise; with what has come by then
AWAY_S = 10.0  # that a server is left alone after an error
CLOSE_S = 10.0
READS, WRITES, LOOKS = 4, 2, 2  # threads


class SharedL2Adapter(TaskAnswers, L2AdapterInterface):  # type: ignore[misc]  # untyped base
    """Objects of LMCache's server in a Valkey or Redis, which may start later. Thread-safe.

    Queued writes hold a quarter of LMCache's memory. Raises SettingsError if one of the option's
    `adapter_params` is wrong.
    """

    RESIDENCY = "REMOTE"

    def __init__(
        self, params: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        super().__init__(READS, l1_memory_desc)
        self._values = SharedValues(params)
        self._queue_bytes = self._memory_bytes // 4
        self._queued_bytes = 0
        self._queue_lock = threading.Lock()
        self._away_until = 0.0  # by the monotonic clock
        self._layouts: dict[tuple[str, int], ChunkLayout | MemoryLayoutDesc] = {}  # by `_kind`
        self._writes = ThreadPoolExecutor(WRITES, "shared-write")
        self._looks = ThreadPoolExecutor(LOOKS, "shared-look-up")

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue objects to be sent; dropped where too much waits already."""
        task, size = next(NUMBERS), sum(obj.get_size() for obj in objects)
        with self._queue_lock:
            fits = not self._queued_bytes or self._queued_bytes + size <= self._queue_bytes
            if fits:
                self._queued_bytes += size
        if fits:
            self._writes.submit(self._store, task, keys, objects, size)
        else:
            STORE_SHARED.failed("behind", len(keys))
            self._stored.end(task, L2StoreResult(False, 0))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The tasks that have ended, successful if the server has all of their objects."""
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look for objects of their groups' layouts, in one round trip."""
        task = Task(self._located, len(keys), LOOKUP_S, self._time_out)
        self._looks.submit(self._locate, task, keys, group_layout_descs)
        return task.number

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is pinned."""

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Begin to mark objects as used, which memory has too; the last of them first."""
        self._looks.submit(self._touch, keys)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to read objects into memory of their layouts."""
        task = Task(self._loaded, len(keys), LOAD_S, partial(self._time_out, loads=1))
        return self._begin_load(task, keys, objects)

    def report_status(self) -> dict[str, Any]:
        """What the server's status page shows."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "left_alone": self._away,
            "queued_bytes": self._queued_bytes,
        }

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of memory and server."""
        last = threading.Timer(CLOSE_S, self._time_out)
        last.start()
        self._writes.shutdown()
        last.cancel()
        self._values.disconnect()
        self._looks.shutdown(cancel_futures=True)
        self._end_loads()

    def _store(self, task: int, keys: list[ObjectKey], objects: list[MemoryObj], size: int) -> None:
        sent, done, reason = 0, 0, "server" if self._away else ""
        try:
            layouts = [_layout(obj) for obj in objects]
            self._layouts.update(zip(map(_kind, keys), layouts, strict=True))
            names = list(map(value_name, keys, layouts))
            held = [] if reason else self._values.exist(names)
            each = zip(keys, objects, names, layouts, held, strict=False)
            for key, obj, name, layout, is_held in each:
                if not is_held:
                    begun = time.perf_counter()
                    if not self._values.put(name, layout, obj):
                        reason = "behind"
                        break
                    layout.count(STORE_SHARED, key, begun)
                    sent += layout.size
                done += 1
        except ResponseError as error:  # it answers: there is no cause to wait for its reads
            reason = "full" if isinstance(error, OutOfMemoryError) else "refused"
            complain(
                "it takes no writes: %s (docs: troubleshooting#shared-paused)", error, tier="shared"
            )
        except Exception as error:
            reason = "server"
            self.leave_alone(error)
        finally:
            STORE_SHARED.failed(reason, len(keys) - done)
            with self._queue_lock:
                self._queued_bytes -= size
            for key in keys[:done]:
                self._report(key, is_held=True)
            complete = done == len(keys)
            self._stored.end(task, L2StoreResult(complete, sent if complete else 0))

    @property
    def _away(self) -> bool:
        return time.monotonic() < self._away_until

    def leave_alone(self, error: Exception) -> None:
        """Ask the server nothing for a while after an error, and log that."""
        complain(
            "left alone for %g s: %s (docs: troubleshooting#shared-paused)",
            *(AWAY_S, error),
            tier="shared",
        )
        self._away_until = time.monotonic() + AWAY_S

    def _locate(
        self, task: Task, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]
    ) -> None:
        try:
            if not (self._away or task.over):
                asked = [each for each in enumerate(keys) if each[1].object_group_id in layouts]
                names = [value_name(key, layouts[key.object_group_id]) for _, key in asked]
                self._layouts.update({_kind(key): layouts[key.object_group_id] for _, key in asked})
                for (index, key), is_held in zip(asked, self._values.exist(names), strict=True):
                    if is_held:
                        task.hit(index)
                    self._report(key, is_held=is_held)
        except Exception as error:
            self.leave_alone(error)
        finally:
            task.end()

    def _touch(self, keys: list[ObjectKey]) -> None:
        try:
            if not self._away:
                named = ((key, self._layouts.get(_kind(key))) for key in reversed(keys))
                self._values.touch([value_name(key, layout) for key, layout in named if layout])
        except Exception as error:
            self.leave_alone(error)

    def _load(self, task: Task, index: int, key: ObjectKey, obj: MemoryObj) -> None:
        if self._away or task.over:
            return
        begun = time.perf_counter()
        try:
            layout = _layout(obj)
            payload = self._values.get(value_name(key, layout), layout)
            filled = payload is not None and task.hit(index, partial(fill, obj, payload))
            if payload is None:
                self._report(key, is_held=False)
            if filled:
                layout.count(LOAD_SHARED, key, begun)
        except Exception as error:
            self.leave_alone(error)
            LOAD_SHARED.failed("server", not task.over)

    def _report(self, key: ObjectKey, *, is_held: bool) -> None:
        """Report that the server has an object, or not; of no size: LMCache counts bytes by it."""
        (self._notify_keys_stored if is_held else self._notify_keys_deleted)([key], [0])

    def _time_out(self, *, loads: int = 0) -> None:
        LOAD_SHARED.failed("server", loads)
        self.leave_alone(TimeoutError("it answers too slowly"))
        self._values.disconnect()


def _kind(key: ObjectKey) -> tuple[str, int]:
    """Return what all objects of a key's layout have in common."""
    return key.model_name, key.object_group_id


def _layout(obj: MemoryObj) -> ChunkLayout:
    layout = ChunkLayout.of(obj)
    assert layout is not None, "LMCache's server has no objects without a layout"
    return layout
