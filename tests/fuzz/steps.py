"""Steps of an engine through the overlapped path, on a device that runs late.

The engine is three things: blocks that requests get, share and give back; operations that read and
write them, layer by layer, in the engine's stream; and an LMCache that keeps chunks, lends them for
loads and gives them up. The truth is that of a device that does everything at once: `wanted` has
what each byte of the paged cache and of host memory must be when all is done, and each of the
engine's reads is compared with what it had to find.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import copies
import oracle
import torch
from host import Arena
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from late_device import COPIES, ENGINE, KERNELS, LateDevice, PlantedError
from layouts import Cache, Layout, layouts
from support.tuned import tuned

from lmcache_xpu.gpu_connector.in_flight import InFlight

PLACES = 40  # for objects in host memory


@dataclass(frozen=True)
class Prompt:
    """A request to come."""

    content: int
    tokens: int
    kept: int  # leading blocks that the engine may have itself
    early: bool
    stays: bool


prompts = st.builds(
    Prompt,
    content=st.integers(0, 1),
    tokens=st.integers(1, 14),
    kept=st.sampled_from((0, 0, 1, 2)),
    early=st.booleans(),
    stays=st.booleans(),
)


@dataclass(eq=False)
class Running:
    """A request that has blocks."""

    prompt: Prompt
    blocks: list[int]
    tokens: int
    cached: int  # leading tokens that the engine had
    loaded: int  # leading tokens that it has after the load; the rest is computed
    chunks: list[tuple[int, int]] = field(default_factory=list)  # that are loaded
    objs: list[list] = field(default_factory=list)  # [group][chunk]
    lost: bool = False

    def slots(self, block_tokens: int) -> list[int]:
        every = [block * block_tokens + n for block in self.blocks for n in range(block_tokens)]
        return every[: self.tokens]


@dataclass(eq=False)
class Storing:
    """Chunks on their way to LMCache."""

    of: Running
    keys: list[tuple[int, int]]
    objs: list[list]  # [group][chunk]
    put: set[int] = field(default_factory=set)  # groups
    decided: bool = False  # whether they were computed from what was there
    failed: bool = False


class Steps(RuleBasedStateMachine):
    """An engine with our connector, and an LMCache without anything else."""

    @initialize(
        layout=layouts(l=4, b=12, n=2),
        way=copies.ways,
        order=st.sampled_from(
            [
                (),
                (COPIES, ENGINE, KERNELS),
                (KERNELS, ENGINE, COPIES),
                (ENGINE, KERNELS, COPIES),
                (ENGINE, COPIES, KERNELS),
                (COPIES, KERNELS, ENGINE),
            ]
        ),
        chunk=st.integers(1, 3),
        layers=st.integers(3, 6),
        loads=st.integers(0, 3),
        ahead=st.sampled_from((1, 200, 2**30)),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        layout: Layout,
        way: copies.Way,
        order: tuple[str, ...],
        chunk: int,
        layers: int,
        loads: int,
        ahead: int,
        seed: int,
    ) -> None:
        layout = Layout(**vars(layout) | {"sizes": layout.sizes | {"l": layers}})
        self.random = random.Random(seed)
        self.cache = Cache(layout, seed)
        self.paged = self.cache.paged
        self.block_tokens = layout.sizes["n"]
        self.chunk = chunk * self.block_tokens if layout.opaque else chunk + 1
        self.way = copies.Way(**vars(way) | {"buffer": max(100, way.buffer)})
        self.device = LateDevice(order)
        self.connector = copies.connect(layout, self.way)
        self.layerwise = self.connector.LAYERWISE
        self.ahead = ahead
        size = self.connector.get_shape(self.chunk).numel() * layout.dtype.itemsize + 8
        self.arena = Arena(PLACES, size, seed)
        self.wanted = bytearray(self.cache.bytes())
        self.free = list(range(self.paged.blocks))
        self.users: Counter[int] = Counter()
        self.resident: list[Running] = []
        self.stored: dict[tuple[int, int], list] = {}  # content and number: objects by group
        self.storing: set[tuple[int, int]] = set()
        self.reads: list[tuple[Running, int, bytes, bytes]] = []
        self.errors: list[tuple[Running, oracle.MismatchError]] = []
        self.grown: list[Running] = []  # in this step
        with self.on_device():
            self.overlap = InFlight(self.block_tokens, loads=loads > 0, stores=loads != 1)
            self.connector.overlap = self.overlap
            self.connector.initialize_kvcaches_ptr(kvcaches=self.cache.engine)
        for content in (0, 1):  # that there is something to load
            prompt = Prompt(content, 14, kept=0, early=False, stays=False)
            self.step([prompt], told=3, graph=1, fail=0, crowded=False)
            self.publish()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        buffer = self.chunk * self.paged.row * self.paged.planes * self.way.buffer // 100
        with (
            tuned(ahead_bytes=self.ahead, single_layers=1, first_groups=1),
            copies.taken(self.way, buffer),
            self.device.installed(),
        ):
            yield

    # What happens

    @rule(
        admitted=st.lists(prompts, min_size=1, max_size=3),
        told=st.integers(0, 3),
        graph=st.integers(0, 3),
        fail=st.one_of(st.just(0), st.integers(1, 8), st.integers(1, 40)),
        crowded=st.booleans(),
    )
    def step(self, admitted: list[Prompt], told: int, graph: int, fail: int, crowded: bool) -> None:
        """Requests come in; what they need is loaded, computed, stored.

        Of what the package enqueues meanwhile, number `fail` fails; none if it is 0. With
        `crowded`, LMCache gives up what is loaded as soon as it may.
        """
        self.device.fail_at(fail)
        with self.on_device():
            donors = list(self.resident)
            step = [one for prompt in admitted if (one := self._admit(prompt, donors))]
            grown = self._grow(donors)
            for one in step:
                if one.chunks and one.prompt.early and not self.layerwise and self.overlap.loads:
                    self.overlap.schedule(self._new(one), one.tokens - one.loaded)
                    self._load(one)
            written = frozenset().union(grown, *(self._new(one) for one in step))
            computed = sum(one.tokens - one.loaded for one in step)
            self.overlap.begin_step(written if told else None, computed if told > 1 else None)
            loads = {}
            for one in step:
                if one.chunks and self.layerwise:
                    loads[one] = self._load_layers(one)
                elif one.objs:
                    self._load(one)
            for one in step if crowded else ():
                for start, _ in one.chunks:
                    if (key := (one.prompt.content, start // self.chunk)) in self.stored:
                        self._evict(key)
            self._compute(step, loads, graph=not graph and not self.layerwise)
            for one in [one for one in step if one.lost]:
                self._compute_again(one)
            if not self.layerwise:
                for one in step:
                    self._store(one)
            for one in step:
                if one.prompt.stays:
                    self.resident.append(one)
                else:
                    self._give_back(one)
        self.device.fail_at(0)

    @rule(what=st.integers(0, 4), number=st.integers(0, 40))
    def meanwhile(self, what: int, number: int) -> None:
        """A request ends, LMCache gives up a chunk, the device or the finishing thread has time."""
        if what == 0 and self.resident:
            self._give_back(self.resident.pop(number % len(self.resident)))
        elif what == 1 and self.stored:
            self._evict(sorted(self.stored)[number % len(self.stored)])
        elif what == 2:
            for _ in range(number):
                self.device.step()
        elif what == 3:
            self.publish()
        elif what == 4 and number > 20:
            self.settle()

    def publish(self) -> None:
        with self.on_device():
            self.device.finisher.work()
        self._raise()

    def settle(self) -> None:
        """All is done: every byte is compared, and every reference."""
        with self.on_device():
            self.overlap.drain()
            self.device.finish()
        self._raise()
        for one, layer, found, wanted in self.reads:
            if not one.lost:
                oracle.compare(f"what the engine read of layer {layer}", found, wanted)
        self.reads.clear()
        oracle.compare("the paged cache", self.cache.bytes(), self.wanted)
        oracle.compare("host memory", self.arena.bytes(), self.arena.wanted)
        held = sum(len(objs) for objs in self.stored.values())
        if self.arena.lent != held:
            raise oracle.MismatchError(f"{self.arena.lent} objects are lent, {held} are stored")

    def teardown(self) -> None:
        if hasattr(self, "overlap"):
            self.settle()

    # Requests and blocks

    def _admit(self, prompt: Prompt, donors: list[Running]) -> Running | None:
        size = self.block_tokens
        kept = [
            donor.blocks[: min(prompt.kept, donor.tokens // size, (prompt.tokens - 1) // size)]
            for donor in donors
            if donor.prompt.content == prompt.content
        ]
        blocks = max(kept, key=len, default=[])[:]
        cached = len(blocks) * size
        need = -(-prompt.tokens // size) - len(blocks)
        if need > len(self.free):
            return None
        # Those that were given back last come first.
        blocks += [self.free.pop() for _ in range(need)]
        self.users.update(blocks)
        found = 0
        while (found + 1) * self.chunk <= prompt.tokens and (prompt.content, found) in self.stored:
            found += 1
        one = Running(prompt, blocks, prompt.tokens, cached, max(cached, found * self.chunk))
        if one.loaded > cached:
            first = cached // self.chunk if self.random.random() < 0.5 else 0
            one.chunks = [(n * self.chunk, (n + 1) * self.chunk) for n in range(first, found)]
            held = [self.stored[prompt.content, n] for n in range(first, found)]
            one.objs = [list(group) for group in zip(*held, strict=True)]
            for obj in (obj for group in one.objs for obj in group):
                obj.ref_count_up()
        return one

    def _new(self, one: Running) -> frozenset[int]:
        return frozenset(one.blocks[one.cached // self.block_tokens :])

    def _grow(self, donors: list[Running]) -> frozenset[int]:
        """Requests that run get a token more, and a block where they need one."""
        new = set()
        for one in donors:
            if self.paged.block and one.tokens % self.block_tokens:
                continue  # its whole block would be written, which others may share
            if one.tokens == len(one.blocks) * self.block_tokens:
                if not self.free or self.random.random() < 0.5:
                    continue
                one.blocks.append(self.free.pop())
                self.users[one.blocks[-1]] += 1
                new.add(one.blocks[-1])
            elif self.users[one.blocks[-1]] > 1:
                continue
            one.tokens += 1
            self.grown.append(one)
        return frozenset(new)

    def _give_back(self, one: Running) -> None:
        for block in one.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    # What the engine does

    def _ranges(self, one: Running, layer: int, first: int, last: int) -> list[oracle.Range]:
        """Bytes of its tokens in a layer; of the blocks they lie in where these are opaque."""
        size = self.block_tokens
        slots = one.slots(size)
        if self.paged.block:
            starts = range(first // size * size, last, size)
            return [part for token in starts for part in self.paged.whole(layer, slots[token])]
        return [
            part
            for token in range(first, last)
            for plane in range(self.paged.planes)
            for part in self.paged.parts(layer, plane, slots[token])
        ]

    def _engine_reads(self, one: Running, layer: int) -> None:
        ranges = self._ranges(one, layer, 0, one.loaded)
        wanted = b"".join(self.wanted[at : at + size] for at, size in ranges)

        def read() -> None:
            there = memoryview(self.cache.raw.numpy())
            found = b"".join(there[at : at + size] for at, size in ranges)
            self.reads.append((one, layer, found, wanted))

        self.device.enqueue(read)

    def _engine_writes(self, one: Running, layer: int, first: int) -> None:
        values = [
            (at, self.random.randbytes(size))
            for at, size in self._ranges(one, layer, first, one.tokens)
        ]
        for at, value in values:
            self.wanted[at : at + len(value)] = value

        def write() -> None:
            there = memoryview(self.cache.raw.numpy())
            for at, value in values:
                there[at : at + len(value)] = value

        self.device.enqueue(write)

    def _compute(self, step: list[Running], loads: dict, *, graph: bool) -> None:
        groups = self.connector.groups if self.layerwise else []
        stores = {}
        if graph:
            self.overlap.before_all()
        for layer in range(self.paged.layers):
            for number, (first, _) in enumerate(groups):
                if first == layer:
                    for one, steps in loads.items():
                        self._send(one, steps, number + 1)
            if not graph:
                self.overlap.before_layer(layer)
            for one in step:
                self._engine_reads(one, layer)
                self._engine_writes(one, layer, min(one.loaded, one.tokens - 1))
            for one in self.grown:
                self._engine_writes(one, layer, one.tokens - 1)
            for number, (_, last) in enumerate(groups):
                if last == layer + 1:
                    for one in step:
                        self._store_layers(one, stores, number)
            if not graph:
                self.overlap.after_layer(layer)
        self.grown.clear()
        for slots in self.overlap.end_step():
            blocks = {slot // self.block_tokens for slot in slots.tolist()}
            for one in step:
                one.lost = one.lost or bool(one.chunks and blocks & self._new(one))
        if any(one.lost for one in step) and not self.device.failed:
            raise oracle.MismatchError("a load was given up, and none failed")
        for one, (steps, store) in stores.items():
            if one.lost:
                steps.close()
            elif not store.failed:
                next(steps)
            if not self.overlap.stores:
                for group in range(len(store.objs)):
                    self._put(store, group)
            store.decided = True
            self._conclude(store)

    def _compute_again(self, one: Running) -> None:
        self.overlap.begin_step(frozenset(), one.tokens)
        for layer in range(self.paged.layers):
            self._engine_writes(one, layer, one.cached)
        if self.overlap.end_step():
            raise oracle.MismatchError("a load was given up twice")

    # Loads and stores, as LMCache asks for them

    def _expect_load(self, one: Running, group: int) -> None:
        chunks = self._oracle_chunks(one.objs[group], one.chunks, group)
        moves = oracle.pairs(self.paged, chunks, one.slots(self.block_tokens), one.cached)
        oracle.load(self.wanted, self.arena.wanted, moves, b"")

    def _oracle_chunks(self, objs: list, spans: list, group: int) -> list[oracle.Chunk]:
        groups = self.connector.groups if self.layerwise else [(0, self.paged.layers)]
        first, last = groups[group]
        return [
            oracle.Chunk(obj.meta.address, *span, self.way.order, groups[0][1], first, last - first)
            for obj, span in zip(objs, spans, strict=True)
        ]

    def _given(self, one: Running, spans: list[tuple[int, int]]) -> dict:
        return {
            "starts": [start for start, _ in spans],
            "ends": [end for _, end in spans],
            "kvcaches": self.cache.engine,
            "slot_mapping": torch.tensor(one.slots(self.block_tokens)),
        }

    def _load(self, one: Running) -> None:
        self._expect_load(one, 0)
        (objs,), one.objs = one.objs, []
        try:
            given = self._given(one, one.chunks)
            self.connector.batched_to_gpu(objs, **given, vllm_cached_tokens=one.cached)
        except PlantedError:
            one.lost = True
        for obj in objs:
            obj.ref_count_down()

    def _load_layers(self, one: Running) -> Iterator:
        given = self._given(one, one.chunks)
        steps = self.connector.batched_to_gpu(**given, vllm_cached_tokens=one.cached)
        next(steps)
        for group in range(len(one.objs)):
            self._expect_load(one, group)
        self._send(one, steps, 0)
        return steps

    def _send(self, one: Running, steps: Iterator, group: int) -> None:
        objs = one.objs[group] if group < len(one.objs) else None
        if not one.lost:
            try:
                steps.send(objs)
            except PlantedError:
                one.lost = True
        for obj in objs or ():
            obj.ref_count_down()

    def _to_store(self, one: Running) -> Storing:
        content, size = one.prompt.content, self.chunk
        numbers = [
            n
            for n in range(one.tokens // size)
            if (content, n) not in self.stored and (content, n) not in self.storing
        ]
        groups = self.connector.groups if self.layerwise else [None]
        while numbers and self.arena.room < len(numbers) * len(groups):
            if not self.stored:
                return Storing(one, [], [])
            self._evict(min(self.stored))
            if self.arena.room < len(numbers) * len(groups):
                numbers = numbers[:-1]
        shape, dtype = self.connector.get_shape(size), self.cache.layout.dtype
        fmt = copies.format_of(self.connector)
        objs = [[self.arena.allocate(shape, dtype, fmt) for _ in numbers] for _ in groups]
        keys = [(content, n) for n in numbers]
        self.storing |= set(keys)
        return Storing(one, keys, objs)

    def _store(self, one: Running) -> None:
        store = self._to_store(one)
        if not store.keys:
            return
        self._expect_store(store, 0)
        given = self._given(one, self._spans(store))
        store.decided = True
        try:
            self.connector.batched_from_gpu(store.objs[0], **given)
        except PlantedError:
            self._fail(store, 0)
            return
        self.overlap.publish(store.objs[0], lambda: self._put(store, 0))

    def _store_layers(self, one: Running, stores: dict, group: int) -> None:
        if group == 0:
            store = self._to_store(one)
            if not store.keys:
                return
            given = self._given(one, self._spans(store))
            stores[one] = self.connector.batched_from_gpu(store.objs, **given), store
        if one not in stores or stores[one][1].failed:
            return
        steps, store = stores[one]
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

    def _raise(self) -> None:
        for one, error in self.errors:
            if not (one.lost and self.layerwise):
                raise error
        self.errors.clear()
