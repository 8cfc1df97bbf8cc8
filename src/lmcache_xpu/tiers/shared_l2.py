"""The shared tier in LMCache's server: an L2 adapter over a Valkey or Redis that engines share.

Switched on by an option of `lmcache server`, whose value `shared_option` writes.

The server may be away, slow, full or empty at any time, and its values may be damaged: then an
object is not found, or not kept. After an error, or a look-up or a load that takes too long in all,
the server is left alone for some seconds, as a request would wait for each attempt. One that
answers, but takes no writes, is only not written to. A value that is damaged, or is no object of
its name's layout, is deleted.

LMCache counts no objects here and deletes none: the server evicts, also between a look-up and its
load. Memory is lent until a task ends, or taken back sooner: it is checked before a value is sent,
and before each slice is written. Nothing raises into LMCache or waits for the server there.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from redis.exceptions import OutOfMemoryError, ResponseError

from lmcache_xpu.metrics import LOAD_SHARED, STORE_SHARED, Flow, Stopwatch
from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.pause import Pause
from lmcache_xpu.tiers.shared_values import SharedValues, fill, value_name
from lmcache_xpu.tiers.task_results import Task, TaskAnswers, after_all

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache.v1.distributed.api import MemoryLayoutDesc, MemoryTags, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["SharedL2Adapter"]

LOOKUP_S = 1.0  # in all, for which a request may wait
LOAD_S = 8.0  # likewise; with what has come by then
AWAY_S = 10.0  # that a server is left alone after an error, or not written to after a refusal
CLOSE_S = 10.0
READS, WRITES, LOOKS = 4, 2, 2  # threads
_QUEUE_BYTES = 1 << 30  # of writes, where L1's size is not known


class SharedL2Adapter(TaskAnswers, L2AdapterInterface):  # type: ignore[misc]  # untyped base
    """Objects of LMCache's server in a Valkey or Redis, which may start later. Thread-safe.

    Args:
        params: the option's `adapter_params`: `shared.url`.
        l1_memory_desc: LMCache's memory. Queued writes hold a quarter of it.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(
        self, params: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        super().__init__()
        self._values = SharedValues(params)
        self._queue_bytes = l1_memory_desc.size // 4 if l1_memory_desc else _QUEUE_BYTES
        self._queued_bytes = 0
        self._queue_lock = threading.Lock()
        self._away = Pause("left alone")
        self._refusing = Pause("not written to")
        self._refusal = ""
        self._writes = ThreadPoolExecutor(WRITES, "shared-write")
        self._reads = ThreadPoolExecutor(READS, "shared-read")
        self._looks = ThreadPoolExecutor(LOOKS, "shared-look-up")

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue objects to be sent; what exceeds the bound on the queue is dropped."""
        task = self._stored.begin()
        with self._queue_lock:
            room = self._queue_bytes - self._queued_bytes
            ends = itertools.accumulate(obj.get_size() for obj in objects)
            sizes = [end for end in ends if end <= room]
            size = sizes[-1] if sizes else 0
            self._queued_bytes += size
        dropped = len(keys) - len(sizes)
        _failed(STORE_SHARED, "behind", dropped)
        writes = list(zip(keys, objects, strict=True))[: len(sizes)]
        self._writes.submit(self._store, task, writes, size, dropped)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The tasks that have ended, successful if the server has all of their objects."""
        return self._stored.take_all()

    # Look-up

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look for objects of their groups' layouts, in one round trip."""
        task = Task(self._located, len(keys), LOOKUP_S, self._time_out)
        self._looks.submit(self._locate, task, keys, group_layout_descs)
        return task.number

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is pinned."""

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to read objects into memory of their layouts."""
        task = Task(self._loaded, len(keys), LOAD_S, partial(self._time_out, loads=1))
        reads = [
            self._reads.submit(self._load, task, index, key, obj)
            for index, (key, obj) in enumerate(zip(keys, objects, strict=True))
        ]
        after_all(reads, task.end)
        return task.number

    # The rest of LMCache's interface

    def get_memory_tags(self) -> MemoryTags:
        """Another host's. LMCache 0.5.7 asks; 0.5.6 has no such names."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.REMOTE)

    def report_status(self) -> dict[str, Any]:
        """What the server's status page shows."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "left_alone": self._away.on,
            "not_written_to": self._refusing.on,
            "queued_bytes": self._queued_bytes,
        }

    def close(self) -> None:
        """End the queued writes, within ten seconds, and let go of memory and server."""
        last = threading.Timer(CLOSE_S, self._time_out)
        last.start()
        self._writes.shutdown()
        last.cancel()
        self._values.disconnect()
        for threads in (self._reads, self._looks):
            threads.shutdown(cancel_futures=True)
        self._close_results()

    # In threads

    def _store(
        self, task: int, writes: list[tuple[ObjectKey, MemoryObj]], size: int, dropped: int
    ) -> None:
        sent, done, reason = 0, 0, self._paused
        try:
            layouts = [_layout(obj) for _, obj in writes]
            names = [
                value_name(key, layout) for (key, _), layout in zip(writes, layouts, strict=True)
            ]
            held = [] if reason else self._values.exist(names)
            for (key, obj), name, layout, is_held in zip(
                writes, names, layouts, held, strict=False
            ):
                if not is_held:
                    if reason := self._paused:
                        break
                    watch = Stopwatch()
                    with watch.running():
                        if not self._values.put(name, layout, obj):
                            reason = "behind"
                            break
                    layout.count(STORE_SHARED, key, watch)
                    sent += layout.size
                done += 1
        except ResponseError as error:  # it answers: there is no cause to wait for its reads
            reason = self._refusal = "full" if isinstance(error, OutOfMemoryError) else "refused"
            self._refusing.begin(AWAY_S, error)
        except Exception as error:
            reason = "server"
            self._away.begin(AWAY_S, error)
        finally:
            _failed(STORE_SHARED, reason, len(writes) - done)
            with self._queue_lock:
                self._queued_bytes -= size
            complete = done == len(writes) and not dropped
            self._report([key for key, _ in writes[:done]], is_held=True)
            self._stored.end(task, L2StoreResult(complete, sent if complete else 0))

    @property
    def _paused(self) -> str:
        """Why nothing is written now; empty if it is."""
        return "server" if self._away.on else self._refusal if self._refusing.on else ""

    def _locate(
        self, task: Task, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]
    ) -> None:
        try:
            if not (self._away.on or task.over):
                names = {
                    index: value_name(key, layouts[key.object_group_id])
                    for index, key in enumerate(keys)
                    if key.object_group_id in layouts
                }
                held = dict(zip(names, self._values.exist(list(names.values())), strict=True))
                for index, is_held in held.items():
                    if is_held:
                        task.hit(index)
                for is_held in (True, False):
                    self._report([keys[i] for i in held if held[i] == is_held], is_held=is_held)
        except Exception as error:
            self._away.begin(AWAY_S, error)
        finally:
            task.end()

    def _load(self, task: Task, index: int, key: ObjectKey, obj: MemoryObj) -> None:
        if self._away.on or task.over:
            return
        watch = Stopwatch()
        try:
            layout = _layout(obj)
            with watch.running():
                payload = self._values.get(value_name(key, layout), layout)
                filled = payload is not None and task.hit(index, partial(fill, obj, payload))
            if payload is None:
                self._report([key], is_held=False)
            if filled:
                layout.count(LOAD_SHARED, key, watch)
        except Exception as error:
            self._away.begin(AWAY_S, error)
            _failed(LOAD_SHARED, "server", not task.over)

    def _report(self, keys: list[ObjectKey], *, is_held: bool) -> None:
        """Report what the server has, or not; of no size, as LMCache counts bytes by these."""
        if keys:
            notify = self._notify_keys_stored if is_held else self._notify_keys_deleted
            notify(keys, [0] * len(keys))

    def _time_out(self, *, loads: int = 0) -> None:
        _failed(LOAD_SHARED, "server", loads)
        self._away.begin(AWAY_S, TimeoutError("it answers too slowly"))
        self._values.disconnect()


def _layout(obj: MemoryObj) -> ChunkLayout:
    layout = ChunkLayout.of(obj)
    assert layout is not None, "LMCache's server has no objects without a layout"
    return layout


def _failed(flow: Flow, reason: str, count: int) -> None:
    for _ in range(count):
        flow.failed(reason)
