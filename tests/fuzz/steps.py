"""Steps of an engine whose transfers run beside it, on a device that runs late.

The engine is two things: blocks that requests get, share and give back; and operations that read
and write them, layer by layer, in the engine's stream. The cache is the package's. The truth is
that of a device that does everything at once: `wanted` has what each byte of the paged cache must
be when all is done, each of the engine's reads is compared with what it had to find, and what is
published with what was there when its store was asked for.

There is one rule: of several, Hypothesis leaves some out of most cases, and without steps a case
shows nothing.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import oracle
import ways
from blocks import Blocks
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from keeper import Keeper
from late_device import COPIES, ENGINE, KERNELS, LateDevice
from paged_layers import Layers, PagedLayers, layers
from running import LONGEST, Prompt, Running, Storing, prompts
from support.tuned import tuned

from lmcache_xpu.cache.local_client import LocalClient
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.model.kv_cache_groups import CacheGroup

PLACES = 16  # for objects in host memory
ORDERS = (
    (),
    (COPIES, ENGINE, KERNELS),
    (KERNELS, ENGINE, COPIES),
    (ENGINE, KERNELS, COPIES),
    (ENGINE, COPIES, KERNELS),
    (COPIES, KERNELS, ENGINE),
)


class Steps(Blocks, RuleBasedStateMachine):
    """An engine, and a worker's transfers."""

    @initialize(
        layout=layers(),
        way=ways.every,
        order=st.sampled_from(ORDERS),
        blocks=st.integers(1, 3),
        ahead=st.sampled_from((1, 200, 2**30)),
        stored=st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST)),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        layout: Layers,
        way: ways.Way,
        order: tuple[str, ...],
        blocks: int,
        ahead: int,
        stored: tuple[int, int],
        seed: int,
    ) -> None:
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.paged = PagedLayers(layout, seed)
        self.block_tokens = layout.block_tokens
        self.chunk = blocks * self.block_tokens
        # Kernels never move host memory as if it were the device's: its parts may lie at any byte.
        in_place = not (way.buffer or way.triton)
        self.way = ways.Way(**vars(way) | {"buffer": 0 if in_place else max(100, way.buffer)})
        self.ahead = ahead
        self.wanted = bytearray(self.paged.bytes())
        self.layout = layout
        self.free = list(range(1, layout.blocks_of_group))  # without vLLM's null block
        self.users: Counter[int] = Counter()
        self.resident: list[Running] = []
        self.waiting: list[Running] = []
        self.stores: list[Storing] = []
        self.reads: list[tuple[Running, int, bytes, bytes]] = []
        self.grown: list[Running] = []  # in this step
        self.device = LateDevice(order)
        self.keeper = Keeper(self.device, PLACES, self.chunk, layout.groups)
        with self.on_device():
            groups = [
                CacheGroup(
                    number=number, layers=layout.names(number), block_tokens=self.block_tokens
                )
                for number in range(layout.groups)
            ]
            engine = self.paged.engine
            copies = [GroupCopies(group, engine, layout.blocks, self.chunk) for group in groups]
            client = LocalClient(self.keeper.cache, None)
            self.transfers = Transfers(client, copies, 1.0, engine)
            self.transfers.register()
            self.loads = self.transfers.in_steps
        for content, tokens in enumerate(stored):  # that there is something to load
            prompt = Prompt(content, tokens, kept=0, waits=False, stays=False)
            self.step([prompt], early=False, graph=1, fail=0, crowd=0, turns=0)
            self.settle()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        page = max(self.paged.layout.widths) * self.chunk
        with (
            tuned(ahead_bytes=self.ahead, single_layers=1, first_groups=1),
            ways.taken(self.way, page * self.way.buffer // 100),
            self.device.installed(),
        ):
            yield

    # What happens

    @rule(
        admitted=st.lists(prompts, min_size=1, max_size=3),
        early=st.booleans(),
        graph=st.integers(0, 3),
        fail=st.one_of(st.just(0), st.integers(2, 8), st.integers(1, 16), st.integers(1, 40)),
        crowd=st.sampled_from((0, 0, 3, PLACES)),
        turns=st.integers(0, 12),
        then=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=2),
    )
    def go_on(
        self,
        admitted: list[Prompt],
        early: bool,
        graph: int,
        fail: int,
        crowd: int,
        turns: int,
        then: list[tuple[int, int]],
    ) -> None:
        """A step, and what happens before the next one; see `step` and `meanwhile`."""
        self.step(admitted, early, graph, fail, crowd, turns)
        for what, number in then:
            self.meanwhile(what, number)

    def step(
        self,
        admitted: list[Prompt],
        early: bool,
        graph: int,
        fail: int,
        crowd: int,
        turns: int,
    ) -> None:
        """Requests come in; what they need is loaded, computed, stored.

        Of what the package enqueues from now on, number `fail` fails; none if it is 0. With
        `early`, loads begin before the step's worker hears of it. Others store `crowd` chunks as
        soon as the step is enqueued. The threads have `turns` turns until the engine has the
        step's tokens, and looks at what was left unfilled.
        """
        self.device.fail_at(fail)
        with self.on_device():
            ended, failed = self.transfers.take_ended()
            step = [request for request in self.waiting if request.name in ended]
            self.waiting = [request for request in self.waiting if request not in step]
            written = set()
            for request in step:
                if request.name in failed:
                    self._excuse(request)
                    request.loaded = request.cached
                written.update(request.blocks[request.loaded // self.block_tokens :])
                request.load = None
            while self.resident and len(self.free) * self.block_tokens < LONGEST:
                self._give_back(self.resident.pop(0))
            donors = list(self.resident)
            new = [request for prompt in admitted if (request := self._admit(prompt, donors))]
            grown = self._grow(donors)
            for request in new:
                request.failures = self.device.failures
            waiting = [request for request in new if request.prompt.waits and request.load]
            step += [request for request in new if request not in waiting]
            written |= grown.union(*map(self._new, new))
            written = self._of_all_groups(written)
            loading = [request for request in step if request.load]
            computed = sum(request.tokens - request.loaded for request in step)

            self.transfers.let_write(written)
            self.loads.begin_step(written)
            for request in loading:
                self._expect_load(request)
                self.loads.ask(request.load)
            if early:
                self.loads.begin_answered(computed, scheduling=True)
            self.loads.begin_answered(computed)
            self.loads.begin(whole=not graph)
            event = self.transfers.event()
            for request in waiting:
                self._expect_load(request)
                request.transfer = self.transfers.load(request.load, event)
            self.waiting += waiting
            self._compute(step, whole=not graph)
            self.loads.end()
            stores = [self._store(request) for request in step]
            if crowd:
                self.keeper.crowd(crowd)
            for number in range(turns):
                self.device.threads[number % 2].work()
            unfilled = set(self.loads.take())
            for request, store in zip(step, stores, strict=True):
                if request.load and not unfilled.isdisjoint(self._new(request)):
                    self._excuse(request)
                    request.lost = store.spoiled = True
                    self._compute_again(request)
                if request.prompt.stays:
                    self.resident.append(request)
                else:
                    self._give_back(request)

    def meanwhile(self, what: int, number: int) -> None:
        """A request ends, others store, the device or one of the threads has time."""
        with self.on_device():
            if what == 0 and self.resident:
                self._give_back(self.resident.pop(number % len(self.resident)))
            elif what == 1:
                self.keeper.crowd(number % 4)
            elif what == 2:
                for _ in range(number):
                    self.device.step()
            elif what == 3:
                self.device.finisher.work()
            elif what == 4:
                self.device.threads[number % 2].work()
        if what == 5 and number > 20:
            self.settle()

    def settle(self) -> None:
        """All is done: every byte is compared."""
        with self.on_device():
            while sum(thread.work() for thread in self.device.threads):
                self.device.finisher.result()
            self.device.finisher.result()
            self.device.finish()
        assert not self.transfers.busy
        self.keeper.raise_errors()
        for request, layer, actual, wanted in self.reads:
            if not request.lost:
                oracle.compare(f"what the engine read of layer {layer}", actual, wanted)
        self.reads.clear()
        there = self.paged.bytes()
        for request in self.waiting:
            if not request.transfer.result:  # its step, which computes it, is still to come
                self._excuse(request)
                for block in self._new(request):
                    for part in self._parts(block):
                        self.wanted[slice(*part)] = there[slice(*part)]
        oracle.compare("the paged cache", there, self.wanted)
        for store in self.stores:
            if store.spoiled and store.committed:
                raise oracle.MismatchError("what came of a failed load is stored")
        self.stores.clear()
        self.keeper.stores.clear()

    def teardown(self) -> None:
        if not hasattr(self, "loads"):
            return
        try:
            self.settle()
            self.keeper.check_locks()
        finally:
            self.keeper.close()

    # What the engine does

    def _excuse(self, request: Running) -> None:
        if self.device.failures == request.failures:
            raise oracle.MismatchError("a load was given up, and none failed")

    def _expect_load(self, request: Running) -> None:
        """The request's blocks get what was stored."""
        load, size = request.load, self.block_tokens
        blocks = load.blocks[0]
        first = load.start // self.chunk
        for number in range(first, load.end // self.chunk):
            content = [
                self.keeper.chunks[group, request.keys.by_group[group][number]]
                for group in range(self.layout.groups)
            ]
            at = (number - first) * self.chunk // size
            of_chunk = blocks[at : at + self.chunk // size]
            memory = bytearray(self.wanted)
            self.paged.fill(memory, of_chunk, content)
            for block in of_chunk[max(0, load.kept // size - at) :]:
                for part in self._parts(block):
                    self.wanted[slice(*part)] = memory[slice(*part)]

    def _parts(self, block: int) -> list[tuple[int, int]]:
        """Where a block begins and ends, in each layer."""
        return [
            (at, at + size)
            for layer in range(self.paged.layers)
            for at, size in self.paged.parts(layer, block, 0, self.block_tokens)
        ]

    def _ranges(self, request: Running, layer: int, first: int, last: int) -> list[oracle.Range]:
        """Bytes of its tokens in a layer."""
        size = self.block_tokens
        return [
            part
            for token in range(first, last)
            for part in self.paged.parts(
                layer, request.blocks[token // size], token % size, token % size + 1
            )
        ]

    def _engine_reads(self, request: Running, layer: int) -> None:
        ranges = self._ranges(request, layer, 0, request.loaded)
        wanted = b"".join(self.wanted[at : at + size] for at, size in ranges)

        def read() -> None:
            there = memoryview(self.paged.raw.numpy())
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
            there = memoryview(self.paged.raw.numpy())
            for at, value in values:
                there[at : at + len(value)] = value

        self.device.enqueue(write)

    def _compute(self, step: list[Running], *, whole: bool) -> None:
        for layer, name in enumerate(self.paged.engine):
            if not whole:
                self.loads.before_layer(name)
            for request in step:
                self._engine_reads(request, layer)
                self._engine_writes(request, layer, min(request.loaded, request.tokens - 1))
            for request in self.grown:
                self._engine_writes(request, layer, request.tokens - 1)
            if not whole:
                self.loads.after_layer(name)
        self.grown.clear()

    def _store(self, request: Running) -> Storing:
        """Store what a request has computed, or all of it."""
        size = self.block_tokens
        first = request.loaded // self.chunk if self.random.random() < 0.7 else 0
        last = request.tokens // self.chunk
        store = Storing(request, {})
        if first >= last:
            return store
        chunks = self._range(request, first * self.chunk, last * self.chunk)
        for number in range(first, last):
            blocks = request.blocks[number * self.chunk // size : (number + 1) * self.chunk // size]
            store.chunks[number] = self.paged.chunk(self.wanted, blocks)
        chunks = replace(chunks, tokens=self.keeper.keys_to_store(request, store))
        event = self.transfers.event()
        self.stores.append(store)
        self.transfers.store(chunks, event, request.blocks)
        return store

    def _compute_again(self, request: Running) -> None:
        written = self._of_all_groups(self._new(request))
        self.transfers.let_write(written)
        self.loads.begin_step(written)
        for layer in range(self.paged.layers):
            self._engine_writes(request, layer, request.cached)
        self.loads.end()
        request.loaded = request.cached
        self._store(request)
        if set(self.loads.take()):
            raise oracle.MismatchError("a load was given up twice")
