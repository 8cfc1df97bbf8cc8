"""A store and a load of some chunks, from the first question to the server's last answer.

Both run in threads beside the engine, see `transfer_queue`. A load inside a step takes the parts of
a load one by one, see `step_loads`.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from lmcache_xpu.cache.hit_places import ObjectSlots, needed_chunks
from lmcache_xpu.cache.protocol import Cache, CachePlaces, TokenRange
from lmcache_xpu.cache.seals import Seals, break_seal, seal, seals_at, seals_of
from lmcache_xpu.cache.server import GivenUpError, LentMemory, Question, Server, check_lease
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.transfer_queue import Transfer
from lmcache_xpu.errors import TransferError
from lmcache_xpu.metrics import Flow
from lmcache_xpu.transfer.devices import Event, SideStream, StoreHandle

# LMCache's thread sends a question. Python lets it run when this one waits, or else after 5 ms.
SENT_S = 0.0003


class Located(NamedTuple):
    """What a load reads, in the server's memory."""

    asked: Question
    slots: ObjectSlots  # the answer
    objects: list[list[torch.Tensor]]  # by group, in the order of chunks; flat bytes on the host
    seals: bytes | None  # that the objects should have, one after another; None without seals

    def check(self) -> None:
        """Compare the seals; GivenUpError if an object is not what it should be."""
        if self.seals is not None:
            ends = [offset + length for *_, offset, length in self.slots.rows]
            if seals_at(self.asked.memory.pool, ends) != self.seals:
                raise GivenUpError("damaged")


class Moves:
    """Moves chunks of all KV cache groups between the engine and a server's memory."""

    _places: CachePlaces  # once `begin_with_server` has asked

    def __init__(self, server: Server, groups: Sequence[GroupCopies], client: Cache) -> None:
        self._server = server
        self._groups = groups
        self._client = client
        self._lock = threading.Lock()  # of staging memory
        self._tokens_per_s: float | None = None
        self._numbers = itertools.count()  # of questions; threads share it
        self._windows = [copies.window_chunks for copies in groups]
        self._stream = SideStream(server.device, urgent=False)

    def begin_with_server(self) -> None:
        """Learn how a new server is asked; waits for it, and raises as `Cache.places`."""
        sizes = [copies.object_bytes for copies in self._groups]
        self._places = self._client.places(sizes, self._windows, self._server.timeout_s)

    def end_with_server(self) -> None:
        """Say to the server that this worker ends, if it knows it; waits for nothing."""
        if hasattr(self, "_places"):
            self._places.leave()

    @contextmanager
    def enqueueing(self) -> Iterator[None]:
        """Let this thread alone enqueue copies: stores and loads share staging memory."""
        with self._lock, torch.inference_mode():
            yield

    def store(self, transfer: Transfer, tokens: TokenRange, event: Event) -> None:
        """Store chunks, behind an event of the engine, and wait until the server has them.

        Raises GivenUpError for a reason of the metrics; others as they come.
        """
        key = self._client.key(tokens, worker=True)
        chunks = [copies.chunks(tokens) for copies in self._groups]
        begun, memory = time.monotonic(), self._server.lent  # a lost server is asked nothing
        places, number = self._places, next(self._numbers)
        lacked = [copies.lacked(each) for copies, each in zip(self._groups, chunks, strict=True)]
        if len(lacked) == 1 and lacked[0]:
            raise GivenUpError("overtaken")  # they left a window, and vLLM has freed their blocks
        slots = self._server.answer(
            places.reserve(number, key, lacked), lambda: transfer.is_cancelled
        )
        if not slots.rows:
            return  # all are there, or there is no room
        try:
            objects, handles = self._objects(memory, slots), list[StoreHandle]()
            with self._copying(transfer, event):
                check_lease(begun)
                for group, copies in enumerate(self._groups):
                    if places.is_sealed:
                        for obj in objects[group]:
                            break_seal(obj)
                    if stored := [chunks[group][chunk] for chunk in slots.chunks(group)]:
                        handles += copies.store(stored, objects[group])
            transfer.enqueued([handle.gathered for handle in handles])
            for handle in handles:
                handle.done.synchronize()
            check_lease(begun)
            if (seals := self._seals(key)) is not None:
                digests = _of_objects(seals, slots)
                for obj, digest in zip(itertools.chain(*objects), digests, strict=True):
                    seal(obj, digest)
            if not self._server.answer(places.commit(number, key)):
                raise GivenUpError("refused")
        except BaseException:
            places.give_up(number)
            raise
        self._count(self._client.store_flow, slots, begun)

    def load(self, transfer: Transfer, tokens: TokenRange, event: Event) -> None:
        """Load chunks into the engine's blocks, but those that vLLM keeps; waits for all.

        Errors as for `store`; the blocks then hold anything.
        """
        asked = self.ask(tokens)
        located = self.locate(asked)
        begun, loads = time.monotonic(), list[Event]()
        with self.ending(asked):
            with self._copying(transfer, event):
                for group, copies in enumerate(self._groups):
                    chunks = copies.chunks(tokens, loading=True)
                    loaded = [chunks[chunk] for chunk in located.slots.chunks(group)]
                    loads += copies.load(loaded, located.objects[group])
            for done in loads:
                done.synchronize()
        seconds = time.monotonic() - begun
        self._tokens_per_s = self.finish(located) / seconds

    def take_speed(self) -> float | None:
        """Tokens a second of the last `load` since the last call; None if none has ended."""
        speed, self._tokens_per_s = self._tokens_per_s, None
        return speed

    # The parts of a load

    def ask(self, tokens: TokenRange) -> Question:
        """Ask where chunks are that were promised; `end_load` has to follow if the server has them.

        Raises GivenUpError if the server is lost.
        """
        key = self._client.key(tokens, worker=True)
        begun, memory, number = time.monotonic(), self._server.lent, next(self._numbers)
        asked = Question(number, key, memory, begun, self._places.locate(number, key))
        asked.answer.wait(SENT_S)
        with self.ending(asked):
            # They take milliseconds, in which the server looks the chunks up.
            return asked._replace(seals=self._seals(key))

    def _seals(self, key: Any) -> Seals | None:
        """Return the seals of a key's chunks; None where nobody else writes to the memory."""
        if not self._places.is_sealed:
            return None
        size = self._client.chunk_tokens
        return [seals_of(key, size, copies.layout) for copies in self._groups]

    def locate(self, asked: Question, at_most_s: float = math.inf) -> Located:
        """Wait for an answer, as `Server.answer`, and compare the seals of what it names.

        Raises:
            GivenUpError: there is no answer, the server lacks a chunk, or an object is not what it
                should be. As after any error, the question has ended.
            TransferError: an answer of another form, or other chunks than a hit needs.
        """
        try:
            slots = self._server.answer(asked.answer, at_most_s=at_most_s)
        except TransferError:
            self.end_load(asked)
            raise
        if slots is None:
            raise GivenUpError("missing")
        with self.ending(asked):
            count = (asked.key.end - asked.key.start) // self._client.chunk_tokens
            for number, expected in enumerate(needed_chunks(count, self._windows)):
                if (chunks := slots.chunks(number)) != list(expected):
                    raise TransferError(f"chunks {chunks} of group {number}", f"chunks {expected}")
            seals = asked.seals
            digests = None if seals is None else b"".join(_of_objects(seals, slots))
            located = Located(asked, slots, self._objects(asked.memory, slots), digests)
            located.check()
        return located

    def finish(self, located: Located) -> int:
        """End a load that has copied all, and return its tokens; errors as `check`, or `late`."""
        try:
            located.check()
            check_lease(located.asked.begun)
        finally:
            self.end_load(located.asked)
        return self._count(self._client.load_flow, located.slots, located.asked.begun)

    def end_load(self, asked: Question) -> None:
        """Say to the server that nothing of an answer is read any more; waits for no answer."""
        self._places.release(asked.number, asked.key)

    @contextmanager
    def ending(self, asked: Question) -> Iterator[None]:
        """Do as `end_load` after an error."""
        try:
            yield
        except BaseException:
            self.end_load(asked)
            raise

    @contextmanager
    def _copying(self, transfer: Transfer, event: Event) -> Iterator[None]:
        """Begin to copy, behind an event of the engine; after an error, wait for the copies."""
        if not transfer.begin_copying():
            raise GivenUpError("overtaken")
        with self.enqueueing(), self._stream.current(), ExitStack() as stack:
            event.wait()
            for copies in self._groups:
                stack.enter_context(copies.copying())
            yield

    def _objects(self, memory: LentMemory, slots: ObjectSlots) -> list[list[torch.Tensor]]:
        return [
            [memory.slot(*slot, copies.object_bytes) for slot in slots.of_group(number)]
            for number, copies in enumerate(self._groups)
        ]

    def _count(self, flow: Flow, slots: ObjectSlots, begun: float) -> int:
        chunks = max(len(slots.chunks(number)) for number in range(len(self._groups)))
        tokens = chunks * self._client.chunk_tokens
        nbytes = sum(length for *_, length in slots.rows)
        flow.moved(time.monotonic() - begun, size_bytes=nbytes, tokens=tokens)
        return tokens


def _of_objects(seals: Seals, slots: ObjectSlots) -> list[bytes]:
    """Return the seals of objects, in their order."""
    return [
        of_group[chunk] for number, of_group in enumerate(seals) for chunk in slots.chunks(number)
    ]
