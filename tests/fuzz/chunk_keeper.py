"""LMCache as the fuzzer's engine has it: it keeps chunks, lends them for loads, gives them up."""

from __future__ import annotations

from collections.abc import Iterator

import oracle
import torch
import ways
from host import Arena
from late_device import PlantedError
from layouts import Cache
from running import Running, Storing

from lmcache_xpu.gpu_connector.base import PagedMemConnector
from lmcache_xpu.gpu_connector.in_flight import InFlight


class ChunkKeeper:
    """Loads and stores, as LMCache asks for them; a part of `Steps`, which sets the attributes."""

    cache: Cache  # the engine's
    paged: oracle.Paged
    block_tokens: int
    wanted: bytearray  # what each byte of the engine's cache must be in the end
    connector: PagedMemConnector
    layerwise: bool
    way: ways.Way
    overlap: InFlight
    arena: Arena  # LMCache's memory
    chunk: int  # tokens
    stored: dict[tuple[int, int], list]  # content and number: objects by group
    storing: set[tuple[int, int]]
    errors: list[tuple[Running, oracle.MismatchError]]

    def _expect_load(self, request: Running, group: int) -> None:
        chunks = self._oracle_chunks(request.objs[group], request.chunks, group)
        moves = oracle.pairs(self.paged, chunks, request.slots(self.block_tokens), request.cached)
        oracle.load(self.wanted, self.arena.wanted, moves, b"")

    def _oracle_chunks(self, objs: list, spans: list, group: int) -> list[oracle.Chunk]:
        groups = self.connector.groups if self.layerwise else [(0, self.paged.layers)]
        first, last = groups[group]
        return [
            oracle.Chunk(obj.meta.address, *span, self.way.order, groups[0][1], first, last - first)
            for obj, span in zip(objs, spans, strict=True)
        ]

    def _arguments(self, request: Running, spans: list[tuple[int, int]]) -> dict:
        return {
            "starts": [start for start, _ in spans],
            "ends": [end for _, end in spans],
            "kvcaches": self.cache.engine,
            "slot_mapping": torch.tensor(request.slots(self.block_tokens)),
        }

    def _load(self, request: Running) -> None:
        self._expect_load(request, 0)
        (objs,), request.objs = request.objs, []
        try:
            arguments = self._arguments(request, request.chunks)
            self.connector.batched_to_gpu(objs, **arguments, vllm_cached_tokens=request.cached)
        except PlantedError:
            request.lost = True
        for obj in objs:
            obj.ref_count_down()

    def _load_layers(self, request: Running) -> Iterator:
        arguments = self._arguments(request, request.chunks)
        steps = self.connector.batched_to_gpu(**arguments, vllm_cached_tokens=request.cached)
        next(steps)
        for group in range(len(request.objs)):
            self._expect_load(request, group)
        self._send(request, steps, 0)
        return steps

    def _send(self, request: Running, steps: Iterator, group: int) -> None:
        objs = request.objs[group] if group < len(request.objs) else None
        if not request.lost:
            try:
                steps.send(objs)
            except PlantedError:
                request.lost = True
        for obj in objs or ():
            obj.ref_count_down()

    def _to_store(self, request: Running) -> Storing:
        content, size = request.prompt.content, self.chunk
        numbers = [
            n
            for n in range(request.tokens // size)
            if (content, n) not in self.stored and (content, n) not in self.storing
        ]
        groups = self.connector.groups if self.layerwise else [None]
        while numbers and self.arena.room < len(numbers) * len(groups):
            if not self.stored:
                return Storing(request, [], [])
            self._evict(min(self.stored))
            if self.arena.room < len(numbers) * len(groups):
                numbers = numbers[:-1]
        shape, dtype = self.connector.get_shape(size), self.cache.layout.dtype
        fmt = ways.format_of(self.connector)
        objs = [[self.arena.allocate(shape, dtype, fmt) for _ in numbers] for _ in groups]
        keys = [(content, n) for n in numbers]
        self.storing |= set(keys)
        return Storing(request, keys, objs)

    def _store(self, request: Running) -> None:
        store = self._to_store(request)
        if not store.keys:
            return
        self._expect_store(store, 0)
        arguments = self._arguments(request, self._spans(store))
        store.decided = True
        try:
            self.connector.batched_from_gpu(store.objs[0], **arguments)
        except PlantedError:
            self._fail(store, 0)
            return
        self.overlap.publish(store.objs[0], lambda: self._put(store, 0))

    def _store_layers(self, request: Running, stores: dict, group: int) -> None:
        if group == 0:
            store = self._to_store(request)
            if not store.keys:
                return
            arguments = self._arguments(request, self._spans(store))
            stores[request] = self.connector.batched_from_gpu(store.objs, **arguments), store
        if request not in stores or stores[request][1].failed:
            return
        steps, store = stores[request]
        self._expect_store(store, group)
        try:
            next(steps)
        except PlantedError:
            self._fail(store, group)
            return
        if self.overlap.stores:
            self.overlap.publish(store.objs[group], lambda: self._put(store, group))

    def _spans(self, store: Storing) -> list[tuple[int, int]]:
        return [(n * self.chunk, (n + 1) * self.chunk) for _, n in store.keys]

    def _expect_store(self, store: Storing, group: int) -> None:
        chunks = self._oracle_chunks(store.objs[group], self._spans(store), group)
        moves = oracle.pairs(self.paged, chunks, store.of.slots(self.block_tokens))
        oracle.store(self.wanted, self.arena.wanted, moves)

    def _fail(self, store: Storing, group: int) -> None:
        """A store ended early: LMCache gives up what it did not take over."""
        for obj in (obj for objs in store.objs[group:] for obj in objs):
            obj.ref_count_down()
        del store.objs[group:]
        store.failed = True
        self._conclude(store)

    def _put(self, store: Storing, group: int) -> None:
        """LMCache takes a group's objects over; they must be complete."""
        there = self.arena.bytes()
        for obj in store.objs[group]:
            at, size = obj.meta.address, len(obj.raw_tensor)
            wanted = self.arena.wanted[at : at + size]
            try:
                oracle.compare("what is published", there[at : at + size], wanted)
            except oracle.MismatchError as error:
                self.errors.append((store.of, error))
        store.put.add(group)
        self._conclude(store)

    def _conclude(self, store: Storing) -> None:
        """What was computed from a lost load is not kept."""
        if not store.decided or len(store.put) < len(store.objs):
            return
        self.storing -= set(store.keys)
        if store.failed or (store.of.lost and self.layerwise):
            for obj in (obj for group in store.objs for obj in group):
                obj.ref_count_down()
            return
        for number, key in enumerate(store.keys):
            self.stored[key] = [group[number] for group in store.objs]

    def _evict(self, key: tuple[int, int]) -> None:
        for obj in self.stored.pop(key):
            obj.ref_count_down()
