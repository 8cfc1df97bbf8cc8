"""A cache's memory: what is read and written, and room, which is made when it is needed.

LMCache looks once a second whether its memory is full, and until then stores and loads nothing more
(`L1EvictionController`, 0.5.6). Here whoever reserves memory evicts as much as is missing: the end
of the least recently used prompt goes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.eviction import L1EvictionPolicy
from lmcache.v1.distributed.eviction_policy import LRUEvictionPolicy

from lmcache_xpu.cache.hit_places import Rows
from lmcache_xpu.metrics import evicted
from lmcache_xpu.versions.lmcache_server import touch, touch_tiers

# LMCache warns of each reservation for which room is only made afterwards: with objects of several
# sizes that is each store into full memory.
logging.getLogger("lmcache.v1.memory_management").addFilter(
    lambda record: not str(record.msg).startswith("Failed to batched allocate")
)
_MOST_RELEASED = 1024  # questions that may be released before they are located


class _Written(NamedTuple):
    keys: list[Any]  # of objects that are reserved
    prompt: list[Any]  # keys of all chunks of their prompt so far, those of one chunk together


def object_layout(size: int) -> Any:
    """Return LMCache's description of an object of so many bytes; see `registration`."""
    return MemoryLayoutDesc(shapes=[torch.Size([1, 1, size])], dtypes=[torch.uint8])


def _in_order(prompt: Sequence[Sequence[Any]]) -> list[Any]:
    return [key for of_chunk in zip(*prompt, strict=True) for key in of_chunk]


class Room:
    """Lends the memory of one cache, and evicts. Called by any thread.

    Each loan is of a question, which is located and released once, or reserved and committed. Of
    the memory of LMCache's storage manager nothing is reserved yet.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._lock = threading.Lock()  # of the next three
        self._reads: dict[Hashable, list[Any]] = {}  # keys of objects, by question
        self._writes: dict[Hashable, _Written] = {}
        self._released: OrderedDict[Hashable, None] = OrderedDict()  # before they were located
        self._kept = threading.local()  # keys that the calling thread's reservation leaves alone
        self._policy = LRUEvictionPolicy()
        self._memory = storage._l1_manager
        self._align: int = storage.l1_memory_desc.align_bytes
        self._memory.register_listener(L1EvictionPolicy(self._policy))
        # LMCache's stores and its loads from other tiers reserve here.
        self._reserve = self._memory.reserve_write
        self._memory.reserve_write = self.reserve_write

    def listen(self, listener: Any) -> None:
        """Have one of LMCache's listeners called for what memory gains and loses."""
        self._memory.register_listener(listener)

    def locate(
        self,
        question: Hashable,
        prompt: Sequence[Sequence[Any]],  # by KV cache group, keys of chunks up to the hit's last
        first: int,  # number of the first chunk that is loaded
        needed: Sequence[range],  # by group, numbers of the chunks, counted from that one
    ) -> Rows | None:
        """Return where chunks of a prompt are, which stay locked until `release`.

        None, and nothing is locked, if a chunk is missing or the question was released.
        """
        places = {
            keys[first + chunk]: (group, chunk)
            for group, (keys, chunks) in enumerate(zip(prompt, needed, strict=True))
            for chunk in chunks
        }
        locked, objects = self._storage.unsafe_read(list(places))
        with self._lock:
            is_released = question in self._released
            self._released.pop(question, None)
            if (is_whole := not is_released and len(locked) == len(places)) and locked:
                self._reads[question] = locked
        if not is_whole:
            self.unlock(locked)
            return None
        touch_tiers(self._storage, _in_order(prompt))  # LMCache tells them of what they loaded
        return [
            (*places[key], each.shm_offset, each.shm_byte_length)
            for key, each in zip(locked, objects, strict=True)
        ]

    def release(self, question: Hashable) -> None:
        """Unlock what a question has located; its own thread may come later than this one."""
        with self._lock:
            if (keys := self._reads.pop(question, None)) is None:
                self._released[question] = None
                if len(self._released) > _MOST_RELEASED:
                    self._released.popitem(last=False)
        self.unlock(keys or [])

    def unlock(self, keys: list[Any]) -> None:
        """Let objects be evicted again, each as often as it was locked."""
        if keys:
            self._storage.finish_read_prefetched(keys)

    def reserve(
        self,
        question: Hashable,
        prompt: Sequence[Sequence[Any]],  # by KV cache group, the keys of its chunks
        first: int,  # number of the first chunk to reserve
        skipped: Sequence[Sequence[int]],  # by group, chunks to leave out, counted from that one
        layouts: Sequence[Any],  # by group, LMCache's description of an object
    ) -> Rows:
        """Reserve the last chunks of a prompt that are not there, as far as there is room.

        They take none of the prompt's own, and nobody finds them until `commit`.
        """
        rows: Rows = []
        written = _Written([], _in_order(prompt))
        self._kept.keys = written.prompt
        try:
            for group, (keys, layout) in enumerate(zip(prompt, layouts, strict=True)):
                places = {
                    key: chunk
                    for chunk, key in enumerate(keys[first:])
                    if chunk not in skipped[group]
                }
                for key, each in self._storage.reserve_write(list(places), layout).items():
                    written.keys.append(key)
                    rows.append((group, places[key], each.shm_offset, each.shm_byte_length))
        finally:
            self._kept.keys = ()
        if written.keys:
            with self._lock:
                self._writes[question] = written
        return rows

    def commit(self, question: Hashable) -> bool:
        """Let others find what was reserved, if it was. The end of its prompt is evicted first."""
        with self._lock:
            written = self._writes.pop(question, None)
        if written is None:
            return False
        touch_tiers(self._storage, written.prompt)  # before LMCache writes to them what is new
        self._storage.finish_write(written.keys)
        touch(self._storage, written.prompt)
        return True

    def give_up(self, question: Hashable) -> None:
        """Forget a store that failed; LMCache takes its memory back when the lease is over."""
        with self._lock:
            self._writes.pop(question, None)

    def drop(self, is_dropped: Callable[[Any], bool]) -> None:
        """End the questions of a worker that has ended without a word.

        What it left half written is published, as LMCache does with its own: see `seals`.
        """
        with self._lock:
            reads = [self._reads.pop(each) for each in filter(is_dropped, list(self._reads))]
            writes = [self._writes.pop(each) for each in filter(is_dropped, list(self._writes))]
        self.unlock([key for keys in reads for key in keys])
        if writes:
            self._storage.finish_write([key for each in writes for key in each.keys])

    def reserve_write(
        self, keys: list[Any], is_temporary: list[bool], layout_desc: Any, tag: str = ""
    ) -> dict[Any, tuple[Any, Any]]:
        """Reserve memory as LMCache's `L1Manager` does, and evict for it."""
        temporary = dict(zip(keys, is_temporary, strict=True))
        shapes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        nbytes = -(-size // self._align) * self._align  # that an object takes
        answers: dict[Any, tuple[Any, Any]] = {}

        def reserve(some: list[Any]) -> list[Any]:
            """Reserve all of these or none, as LMCache does; return all that lack room."""
            some_temporary = [temporary[key] for key in some]
            answers.update(self._reserve(some, some_temporary, layout_desc, tag))
            return [key for key in keys if answers[key][0] == L1Error.OUT_OF_MEMORY]

        needed = len(keys) * nbytes
        self._evict(needed - self._free)
        missing = reserve(keys)
        while missing and self._evict(needed):
            # Objects of other sizes lie between the free bytes: an object needs them in one piece.
            needed *= 2
            missing = reserve(missing)
        fit = min(len(missing) - 1, self._free // nbytes)
        while fit > 0 and len(reserve(missing[:fit])) == len(missing):
            fit //= 2
        return answers

    @property
    def _free(self) -> int:
        used, total = self._memory.get_memory_usage()
        return int(total - used)

    def _evict(self, nbytes: int) -> bool:
        """Evict objects of so many bytes, or all that may go; whether any went."""
        kept, start, any_gone = set(getattr(self._kept, "keys", ())), self._free, False
        while (missing := nbytes - (self._free - start)) > 0:
            used, _ = self._memory.get_memory_usage()
            actions = self._policy.get_eviction_actions(
                min(1.0, missing / max(1, used)),
                lambda key: key not in kept and self._memory.is_key_evictable(key),
            )
            answers = self._memory.delete([key for action in actions for key in action.keys])
            gone = sum(answer == L1Error.SUCCESS for answer in answers.values())
            evicted(gone)
            if not gone:
                break
            any_gone = True
        return any_gone
