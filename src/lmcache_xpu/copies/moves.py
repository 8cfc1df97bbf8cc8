"""A store and a load of some chunks, from the first question to the server's last answer.

    store   ask where (PREPARE_STORE), break seals, copy, seal, tell (COMMIT_STORE)
    load    ask where (PREPARE_RETRIEVE), compare seals, copy, compare them again, tell

They run in threads beside the engine, see `transfer_queue`.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lmcache_xpu.cache.hit_places import ObjectSlots, needed_chunks
from lmcache_xpu.cache.load_questions import LMCacheQuestions, ModuleQuestions, Question
from lmcache_xpu.cache.protocol import Cache, CachePlaces
from lmcache_xpu.cache.seals import Seals, break_seal, seal, seals_at, seals_of
from lmcache_xpu.cache.server import GivenUpError, LentMemory, Server, check_lease
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.transfer_queue import Transfer
from lmcache_xpu.errors import TransferError
from lmcache_xpu.metrics import Flow
from lmcache_xpu.transfer.devices import Event, SideStream

__all__ = ["Located", "Moves"]


class Located(NamedTuple):
    """What a load reads, in the server's memory.

    Args:
        slots: the server's answer.
        objects: by group, in the order of chunks.
        pool: all that the server lends.
        seals: that the objects should have, one after another; None for none.
    """

    slots: ObjectSlots
    objects: list[list[torch.Tensor]]
    pool: torch.Tensor
    seals: bytes | None

    def check(self) -> None:
        """Compare the seals.

        Raises:
            GivenUpError: an object is not what it should be.
        """
        if self.seals is not None and seals_at(self.pool, self.slots.ends) != self.seals:
            raise GivenUpError("damaged")


class Moves:
    """Moves chunks of all KV cache groups.

    Args:
        server: where from and to.
        groups: copies of each group.
        client: of the cache.

    Attributes:
        chunk_tokens: tokens of a chunk.
        enqueueing: held while copies are enqueued; stores and loads share staging memory.
        load_flow: counts loads.
    """

    def __init__(self, server: Server, groups: Sequence[GroupCopies], client: Cache) -> None:
        self.enqueueing = threading.Lock()
        self._near_per_s: float | None = None
        self._numbers = itertools.count()  # of questions; threads share it
        self._server, self._client = server, client
        self._groups = groups
        self.chunk_tokens = client.chunk_tokens
        self.load_flow, self._store_flow = client.load_flow, client.store_flow
        self._windows = [copies.window_chunks for copies in groups]
        self._way: CachePlaces = LMCacheQuestions(client.requests, client.instance_id)
        self._stream = SideStream(server.device, urgent=False)

    def begin_with_server(self) -> None:
        """Learn how a server that has come is asked; waits for it.

        Raises:
            SettingsError: it knows one KV cache group alone.
        """
        sizes = [copies.object_bytes for copies in self._groups]
        self._way = self._client.places(sizes, self._windows, self._server.timeout_s)

    @property
    def module(self) -> ModuleQuestions | None:
        """This package's module of the server, if it has that."""
        return self._way if isinstance(self._way, ModuleQuestions) else None

    def store(
        self, transfer: Transfer, key: Any, blocks: Sequence[list[int]], event: Event | None
    ) -> None:
        """Store chunks that the server does not have.

        Args:
            transfer: is told when the engine's blocks were read.
            key: LMCache's, of the chunks.
            blocks: of each group.
            event: behind what the engine computed.

        Raises:
            GivenUpError: for a reason of the metrics; others as they come.
        """
        chunks = [copies.chunks(ids) for copies, ids in zip(self._groups, blocks, strict=True)]
        begun, memory = time.monotonic(), self._server.lent  # a lost server is asked nothing
        way, number = self._way, next(self._numbers)
        asked = way.reserve(number, key, self._lacked(chunks))
        slots = self._server.answer(asked, lambda: transfer.is_cancelled)
        if not slots:
            return  # all are there, or there is no room
        try:
            self._write(transfer, key, chunks, event, slots, memory, begun)
            if not self._server.answer(way.commit(number, key)):
                raise GivenUpError("refused")
        except BaseException:
            way.give_up(number)
            raise
        self._count(self._store_flow, slots, time.monotonic() - begun)

    def load(
        self, transfer: Transfer, key: Any, blocks: Sequence[list[int]], event: Event | None
    ) -> None:
        """Load chunks into the engine's blocks, but null blocks; arguments and errors as `store`.

        After an error the blocks hold anything.
        """
        asked, seals = self.ask_for_load(key), self.seals(key)
        slots = self.slots(asked)
        try:
            located = self.locate(asked, slots, seals)
            self._copy(transfer, located, blocks, event)
        finally:
            self.end_load(asked)
        check_lease(asked.begun)
        self.count_load(located.slots, time.monotonic() - asked.begun)

    def take_speed(self) -> float | None:
        """Tokens a second of the last `load` since the last call; None if none has ended."""
        speed, self._near_per_s = self._near_per_s, None
        return speed

    def ask_for_load(self, key: Any) -> Question:
        """Ask where chunks are that were promised; `end_load` has to follow if the server has them.

        Raises:
            GivenUpError: the server is lost.
        """
        begun, memory, way = time.monotonic(), self._server.lent, self._way
        number = next(self._numbers)
        return Question(number, key, memory, begun, way.locate(number, key), way)

    def slots(self, asked: Question, at_most_s: float = math.inf) -> ObjectSlots:
        """Wait for the answer to a question, and return what it names.

        Args:
            asked: the question.
            at_most_s: see `Server.answer`.

        Raises:
            GivenUpError: there is no answer, or the server lacks a chunk.
            TransferError: an answer of another form.
        """
        try:
            slots = self._server.answer(asked.answer, at_most_s=at_most_s)
        except TransferError:
            self.end_load(asked)
            raise
        if slots is None:
            raise GivenUpError("missing")
        return slots

    def end_load(self, asked: Question) -> None:
        """Tell the server that nothing of an answer is read any more; waits for no answer."""
        asked.places.release(asked.number, asked.key)

    def seals(self, key: Any) -> Seals | None:
        """Return the seals of a key's chunks, by group; best while the server looks them up.

        Of 61,440 tokens they take milliseconds. None where nobody else writes to the memory.
        """
        if not self._way.is_sealed:
            return None
        return [seals_of(key, self.chunk_tokens, copies.layout) for copies in self._groups]

    def locate(self, asked: Question, slots: ObjectSlots, seals: Seals | None) -> Located:
        """Return what an answer names, and compare the seals.

        Args:
            asked: the question.
            slots: of the answer.
            seals: of the question's key.

        Raises:
            GivenUpError: something is not what it should be.
            TransferError: other chunks than a hit needs.
        """
        count = (asked.key.end - asked.key.start) // self.chunk_tokens
        for number, expected in enumerate(needed_chunks(count, self._windows)):
            if slots.chunks(number) != list(expected):
                raise TransferError(
                    f"chunks {slots.chunks(number)} of group {number}", f"chunks {expected}"
                )
        objects = self._objects(asked.memory, slots)
        digests = None if seals is None else b"".join(_of_objects(seals, slots))
        located = Located(slots, objects, asked.memory.pool, digests)
        located.check()
        return located

    def count_load(self, slots: ObjectSlots, seconds: float) -> None:
        """Count a load that has ended well."""
        self._count(self.load_flow, slots, seconds)

    def _write(
        self,
        transfer: Transfer,
        key: Any,
        chunks: Sequence[list[list[int]]],
        event: Event | None,
        slots: ObjectSlots,
        memory: LentMemory,
        begun: float,
    ) -> None:
        objects = self._objects(memory, slots)
        if not transfer.begin_copying():
            raise GivenUpError("overtaken")
        check_lease(begun)
        handles = []
        with self.enqueueing, torch.inference_mode(), self._stream.current():
            if event is not None:
                event.wait()
            for group, copies in enumerate(self._groups):
                if self._way.is_sealed:
                    for obj in objects[group]:
                        break_seal(obj)
                copies.follow_engine()
                stored = [chunks[group][chunk] for chunk in slots.chunks(group)]
                handles += copies.store(stored, objects[group]) if stored else []
        transfer.enqueued([handle.gathered for handle in handles])
        for handle in handles:
            handle.transfer.done.synchronize()
        check_lease(begun)
        if (seals := self.seals(key)) is not None:
            digests = _of_objects(seals, slots)
            for obj, digest in zip(itertools.chain(*objects), digests, strict=True):
                seal(obj, digest)

    def _lacked(self, chunks: Sequence[list[list[int]]]) -> list[list[int]]:
        """Return by group the chunks that do not hold what a hit needs.

        Raises:
            GivenUpError: one of the only group: it left a window, and vLLM has freed its blocks.
        """
        lacked = [
            [
                number
                for number, ids in enumerate(of_group)
                if not copies.group.is_storable(ids, self.chunk_tokens)
            ]
            for copies, of_group in zip(self._groups, chunks, strict=True)
        ]
        if len(self._groups) == 1 and lacked[0]:
            raise GivenUpError("overtaken")
        return lacked

    def _copy(
        self,
        transfer: Transfer,
        located: Located,
        blocks: Sequence[list[int]],
        event: Event | None,
    ) -> None:
        if not transfer.begin_copying():
            raise GivenUpError("overtaken")
        begun, handles = time.monotonic(), []
        with self.enqueueing, torch.inference_mode(), self._stream.current():
            if event is not None:
                event.wait()
            for number, copies in enumerate(self._groups):
                copies.follow_engine()
                chunks = copies.chunks(blocks[number])
                loaded = [chunks[chunk] for chunk in located.slots.chunks(number)]
                handles += copies.load(loaded, located.objects[number])
        for handle in handles:
            handle.done.synchronize()
        self._near_per_s = self._tokens(located.slots) / (time.monotonic() - begun)
        located.check()

    def _objects(self, memory: LentMemory, slots: ObjectSlots) -> list[list[torch.Tensor]]:
        return [
            [memory.slot(*slot, copies.object_bytes) for slot in slots.of_group(number)]
            for number, copies in enumerate(self._groups)
        ]

    def _count(self, flow: Flow, slots: ObjectSlots, seconds: float) -> None:
        flow.moved(seconds, size_bytes=slots.nbytes, tokens=self._tokens(slots))

    def _tokens(self, slots: ObjectSlots) -> int:
        chunks = max(len(slots.chunks(number)) for number in range(len(self._groups)))
        return chunks * self.chunk_tokens


def _of_objects(seals: Seals, slots: ObjectSlots) -> list[bytes]:
    """Return the seals of objects, in their order."""
    return [
        of_group[chunk] for number, of_group in enumerate(seals) for chunk in slots.chunks(number)
    ]
