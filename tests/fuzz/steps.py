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

import oracle
import ways
from blocks import Blocks
from chunk_keeper import ChunkKeeper
from host import Arena
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from late_device import COPIES, ENGINE, KERNELS, LateDevice
from layouts import Cache, Layout, layouts
from running import Prompt, Running, prompts
from support.tuned import tuned

from lmcache_xpu.gpu_connector.in_flight import InFlight

PLACES = 40  # for objects in host memory


class Steps(Blocks, ChunkKeeper, RuleBasedStateMachine):
    """An engine with our connector, and an LMCache without anything else."""

    @initialize(
        layout=layouts(l=4, b=12, n=2),
        way=ways.every,
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
        way: ways.Way,
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
        self.way = ways.Way(**vars(way) | {"buffer": max(100, way.buffer)})
        self.device = LateDevice(order)
        self.connector = ways.connect(layout, self.way)
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
            ways.taken(self.way, buffer),
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
            step = [request for prompt in admitted if (request := self._admit(prompt, donors))]
            grown = self._grow(donors)
            for request in step:
                if (
                    request.chunks
                    and request.prompt.early
                    and not self.layerwise
                    and self.overlap.loads
                ):
                    self.overlap.schedule(self._new(request), request.tokens - request.loaded)
                    self._load(request)
            written = frozenset().union(grown, *(self._new(request) for request in step))
            computed = sum(request.tokens - request.loaded for request in step)
            self.overlap.begin_step(written if told else None, computed if told > 1 else None)
            loads = {}
            for request in step:
                if request.chunks and self.layerwise:
                    loads[request] = self._load_layers(request)
                elif request.objs:
                    self._load(request)
            for request in step if crowded else ():
                for start, _ in request.chunks:
                    if (key := (request.prompt.content, start // self.chunk)) in self.stored:
                        self._evict(key)
            self._compute(step, loads, graph=not graph and not self.layerwise)
            for request in [request for request in step if request.lost]:
                self._compute_again(request)
            if not self.layerwise:
                for request in step:
                    self._store(request)
            for request in step:
                if request.prompt.stays:
                    self.resident.append(request)
                else:
                    self._give_back(request)
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
        for request, layer, actual, wanted in self.reads:
            if not request.lost:
                oracle.compare(f"what the engine read of layer {layer}", actual, wanted)
        self.reads.clear()
        oracle.compare("the paged cache", self.cache.bytes(), self.wanted)
        oracle.compare("host memory", self.arena.bytes(), self.arena.wanted)
        held = sum(len(objs) for objs in self.stored.values())
        if self.arena.lent != held:
            raise oracle.MismatchError(f"{self.arena.lent} objects are lent, {held} are stored")

    def _raise(self) -> None:
        for request, error in self.errors:
            if not (request.lost and self.layerwise):
                raise error
        self.errors.clear()

    def teardown(self) -> None:
        if hasattr(self, "overlap"):
            self.settle()

    # What the engine does

    def _ranges(self, request: Running, layer: int, first: int, last: int) -> list[oracle.Range]:
        """Bytes of its tokens in a layer; of the blocks they lie in where these are opaque."""
        size = self.block_tokens
        slots = request.slots(size)
        if self.paged.block:
            starts = range(first // size * size, last, size)
            return [part for token in starts for part in self.paged.whole(layer, slots[token])]
        return [
            part
            for token in range(first, last)
            for plane in range(self.paged.planes)
            for part in self.paged.parts(layer, plane, slots[token])
        ]

    def _engine_reads(self, request: Running, layer: int) -> None:
        ranges = self._ranges(request, layer, 0, request.loaded)
        wanted = b"".join(self.wanted[at : at + size] for at, size in ranges)

        def read() -> None:
            there = memoryview(self.cache.raw.numpy())
            actual = b"".join(there[at : at + size] for at, size in ranges)
            self.reads.append((request, layer, actual, wanted))

        self.device.enqueue(read)

    def _engine_writes(self, request: Running, layer: int, first: int) -> None:
        values = [
            (at, self.random.randbytes(size))
            for at, size in self._ranges(request, layer, first, request.tokens)
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
                    for request, steps in loads.items():
                        self._send(request, steps, number + 1)
            if not graph:
                self.overlap.before_layer(layer)
            for request in step:
                self._engine_reads(request, layer)
                self._engine_writes(request, layer, min(request.loaded, request.tokens - 1))
            for request in self.grown:
                self._engine_writes(request, layer, request.tokens - 1)
            for number, (_, last) in enumerate(groups):
                if last == layer + 1:
                    for request in step:
                        self._store_layers(request, stores, number)
            if not graph:
                self.overlap.after_layer(layer)
        self.grown.clear()
        for slots in self.overlap.end_step():
            blocks = {slot // self.block_tokens for slot in slots.tolist()}
            for request in step:
                request.lost = request.lost or bool(request.chunks and blocks & self._new(request))
        if any(request.lost for request in step) and not self.device.failed:
            raise oracle.MismatchError("a load was given up, and none failed")
        for request, (steps, store) in stores.items():
            if request.lost:
                steps.close()
            elif not store.failed:
                next(steps)
            if not self.overlap.stores:
                for group in range(len(store.objs)):
                    self._put(store, group)
            store.decided = True
            self._conclude(store)

    def _compute_again(self, request: Running) -> None:
        self.overlap.begin_step(frozenset(), request.tokens)
        for layer in range(self.paged.layers):
            self._engine_writes(request, layer, request.cached)
        if self.overlap.end_step():
            raise oracle.MismatchError("a load was given up twice")
