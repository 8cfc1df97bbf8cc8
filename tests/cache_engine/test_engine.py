"""Errors of LMCache's engine end in blocks to recompute; its protocols go on to their ends."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_xpu.cache_engine.engine import CacheEngine
from lmcache_xpu.cache_engine.guarded_connectors import LayerwiseConnector, StandardConnector
from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.versions.lmcache import LMCacheEngine, in_process_module

BLOCK, CHUNK, LAYERS = 4, 8, 3
TOKENS = list(range(3 * CHUNK))
MASK = torch.ones(len(TOKENS), dtype=torch.bool)
SLOTS = torch.arange(len(TOKENS)) + 10 * BLOCK  # blocks 10 to 15


class Key:
    def __init__(self, chunk):
        self.chunk = chunk

    def split_layers(self, count):
        return [(self.chunk, layer) for layer in range(count)]


class Manager:
    """Which layers of which chunks are in which tier."""

    def __init__(self):
        self.storage_backends = {"cpu": set(), "disk": set()}

    def contains(self, key, tiers=None):
        return next((t for t in tiers or self.storage_backends if key in self.tier(t)), None)

    def tier(self, name):
        return self.storage_backends[name]

    def remove(self, key):
        for held in self.storage_backends.values():
            held.discard(key)


class LMCache(LMCacheEngine):
    """LMCache's engine: what it does is given by each test."""

    def __init__(self, config, metadata, database, connector, *broadcast):
        self.num_layers = LAYERS
        self.retrieve_locations = None
        self.lookup_pins = {}
        self.storage_manager = Manager()
        self.token_database = SimpleNamespace(
            process_tokens=self.keys, reuse=lambda pinned: contextlib.nullcontext()
        )
        self.gpu_connector = connector
        self.fails = False
        self.fails_at = None
        self.steps = 0  # that a generator has begun
        self.found = len(TOKENS)

    def keys(self, tokens, mask=None):
        return [(i, i + CHUNK, Key(i)) for i in range(0, len(tokens), CHUNK)]

    def retrieve(self, tokens, mask, **kwargs):
        self.move()
        return mask

    def store(self, *args, **kwargs):
        self.move()

    def move(self):
        if self.fails:
            raise RuntimeError("planted")

    def retrieve_layer(self, tokens, mask, **kwargs):
        """As LMCache's, whose tiers are asked chunk by chunk."""
        tiers = {
            self.storage_manager.contains((i, 0), self.retrieve_locations)
            for i in range(0, self.found, CHUNK)
        }
        assert len(tiers - {None}) <= 1
        held = [
            i
            for i in range(0, self.found, CHUNK)
            if self.storage_manager.contains((i, 0), self.retrieve_locations)
        ]
        retrieved = torch.zeros(len(tokens), dtype=torch.bool)
        retrieved[: len(held) * CHUNK] = True
        for step in range(LAYERS):
            self.steps += 1
            if step == self.fails_at:
                raise RuntimeError("planted")
            if step == 0 and held:
                self.gpu_connector.spans = [0], [len(held) * CHUNK]  # as our connector does
            yield None
        self.steps += 1
        yield None
        if not held:
            raise UnboundLocalError
        self.steps += 1
        yield retrieved

    def store_layer(self, tokens, mask=None, **kwargs):
        for layer in range(LAYERS + 1):
            self.steps += 1
            if layer == self.fails_at:
                raise RuntimeError("planted")
            if layer:
                for _, _, key in self.keys(tokens):
                    self.storage_manager.tier("cpu").add((key.chunk, layer - 1))
            yield


ONE_BY_ONE = [(layer, layer + 1) for layer in range(LAYERS)]


class Engine(CacheEngine, LMCache):
    """Ours around it."""


def guarded(*, groups=ONE_BY_ONE):
    unfilled = UnfilledBlocks(BLOCK)
    connector = SimpleNamespace(unfilled=unfilled, overlap=None, groups=groups)
    return Engine(None, None, None, connector, None, None), unfilled


def hold(engine, tier, *chunks):
    for chunk in chunks:
        engine.storage_manager.tier(tier).update((chunk * CHUNK, i) for i in range(LAYERS))


def load(engine):
    return list(engine.retrieve_layer(TOKENS, MASK, slot_mapping=SLOTS))


class Copies:
    """Copies that fail."""

    def batched_to_gpu(self, *args, **kwargs):
        raise RuntimeError("planted")


class Standard(StandardConnector, type("", (Copies, VLLMPagedMemXPUConnectorV2), {})):
    """A connector whose copies fail."""


@pytest.mark.parametrize("cached", [0, 6])
def test_a_failed_load_reports_its_blocks_but_those_that_the_engine_has(cached):
    connector = Standard(16, LAYERS)
    connector.unfilled = UnfilledBlocks(BLOCK)
    kwargs = {"slot_mapping": SLOTS, "vllm_cached_tokens": cached}
    connector.batched_to_gpu([], [0, CHUNK], [CHUNK, 2 * CHUNK], **kwargs)
    assert connector.unfilled.take() == set(range(10 + cached // BLOCK, 16))
    assert connector.unfilled.take() == set()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_failed_layer_ends_the_copies_and_not_the_load(layer):
    class Layers:
        groups = ONE_BY_ONE

        def batched_to_gpu(self, starts, ends, **kwargs):
            for number in range(LAYERS + 2):
                taken.append((yield))
                if number == layer:
                    raise RuntimeError("planted")

    class Layerwise(LayerwiseConnector, type("", (Layers, VLLMPagedMemLayerwiseXPUConnector), {})):
        groups = ONE_BY_ONE

    taken = []
    connector = Layerwise(16, LAYERS)
    connector.unfilled = UnfilledBlocks(BLOCK)
    load = connector.batched_to_gpu([CHUNK], [2 * CHUNK], slot_mapping=SLOTS)
    next(load)
    assert connector.spans == ([CHUNK], [2 * CHUNK])
    for number in range(LAYERS):
        load.send([number])
    next(load)
    assert len(taken) == layer + 1
    assert connector.unfilled.take() == set(range(12, 16))


def test_lmcache_takes_our_layerwise_connector_for_one_of_its_own():
    check = in_process_module("v1.gpu_connector.utils").assert_layerwise_gpu_connector
    check(LayerwiseConnector(16, LAYERS))
    with pytest.raises(AssertionError):
        check(StandardConnector(16, LAYERS))


def test_what_lmcache_itself_raises_is_a_load_of_nothing():
    engine, unfilled = guarded()
    engine.fails = True
    assert not engine.retrieve(TOKENS, MASK, slot_mapping=SLOTS).any()
    assert unfilled.take() == set(range(10, 16))


def test_a_failed_store_is_left_out():
    engine, unfilled = guarded()
    engine.fails = True
    engine.store(TOKENS, mask=MASK)
    assert unfilled.take() == set()


def test_a_layerwise_load_passes_through():
    engine, unfilled = guarded()
    hold(engine, "cpu", 0, 1, 2)
    steps = load(engine)
    assert len(steps) == LAYERS + 2
    assert steps[-1].all()
    assert unfilled.take() == set()


GROUPS = [(0, 3), (3, 6), (6, 8)]  # of a model with eight layers; LMCache knows of three


def test_layers_that_move_together_are_loaded_before_the_first_of_them():
    """Two steps at the start of the engine's step, then one before each layer."""
    engine, unfilled = guarded(groups=GROUPS)
    hold(engine, "cpu", 0, 1, 2)
    seen = []
    for tokens in engine.retrieve_layer(TOKENS, MASK, slot_mapping=SLOTS):
        seen.append(engine.steps)
        last = tokens
    assert seen == [1, 2, 3, 3, 3, 4, 4, 4, 5, 5]  # step g + 3 waits for group g
    assert last.all()
    assert unfilled.take() == set()


def test_layers_that_move_together_are_stored_behind_the_last_of_them():
    """Calls are for layers 0 to 7, and for the end."""
    engine, _ = guarded(groups=GROUPS)
    seen = [engine.steps for _ in engine.store_layer(TOKENS, mask=MASK)]
    assert seen == [0, 0, 1, 1, 1, 2, 2, 3, 4]  # step g + 1 stores group g


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layerwise_load_that_raises_goes_on_to_its_end(layer):
    engine, unfilled = guarded()
    hold(engine, "cpu", 0, 1, 2)
    engine.fails_at = layer
    steps = load(engine)
    assert len(steps) == LAYERS + 2
    assert not steps[-1].any()
    assert unfilled.take() == set(range(10, 16))


def test_a_layerwise_load_that_finds_less_reports_the_rest():
    engine, unfilled = guarded()
    hold(engine, "cpu", 0, 1)
    assert load(engine)[-1].sum() == 2 * CHUNK
    assert unfilled.take() == {14, 15}


def test_a_layerwise_load_that_finds_nothing_ends_well():
    engine, unfilled = guarded()
    steps = load(engine)
    assert len(steps) == LAYERS + 2
    assert not steps[-1].any()
    assert unfilled.take() == set(range(10, 16))


def test_a_prefix_in_two_tiers_comes_from_the_one_that_has_more():
    engine, unfilled = guarded()
    hold(engine, "cpu", 0)
    hold(engine, "disk", 0, 1)
    assert load(engine)[-1].sum() == 2 * CHUNK
    assert engine.retrieve_locations is None
    assert unfilled.take() == {14, 15}


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_a_layerwise_store_that_raises_leaves_no_part_of_a_chunk(layer):
    """LMCache asks for the first layer alone, and would never store the rest."""
    engine, _ = guarded()
    engine.fails_at = layer
    assert len(list(engine.store_layer(TOKENS, mask=MASK))) == LAYERS + 1
    assert engine.storage_manager.tier("cpu") == set()


def test_under_other_weights_nothing_is_looked_up(monkeypatch):
    engine, _ = guarded()
    monkeypatch.setattr(LMCache, "lookup", lambda self, **kwargs: 256, raising=False)
    assert engine.lookup(lookup_id="r") == 256
    engine.refuses_lookups = True
    assert engine.lookup(lookup_id="r") == 0


def test_lmcaches_memory_is_pinned_while_nobody_waits():
    """A driver takes seconds to register many GiB; the first store would wait for it."""
    pinned: list[str] = []
    gpu = SimpleNamespace(initialize_kvcaches_ptr=lambda kvcaches: None, pin=pinned.append)
    backend = SimpleNamespace(memory_allocator=SimpleNamespace(buffer="memory"))
    manager = SimpleNamespace(storage_backends={"LocalCPUBackend": backend})
    engine = SimpleNamespace(gpu_connector=gpu, storage_manager=manager)
    beside = object()
    CacheEngine.register(engine, [], beside)
    assert pinned == ["memory"]
    assert gpu.overlap is manager.in_flight is beside
    manager.storage_backends = {}  # LMCache without a CPU tier
    CacheEngine.register(engine, [], beside)
    assert pinned == ["memory"]


# A rank that uses another one's CPU tier


class Borrowing(CacheEngine):
    """A rank's engine that borrows, and whatever it is told."""

    def __init__(self, borrowed: Any) -> None:
        self.refuses_lookups = False
        self.lender = None
        self.borrower = SimpleNamespace(borrow=lambda order, request: borrowed(order, request))
        self.moved: list[Any] = []
        self.failed: list[Any] = []
        self.gpu_connector = SimpleNamespace(batched_to_gpu=self.move)
        self.unfilled = SimpleNamespace(add_load=lambda *args: self.failed.append(args))

    def move(self, objs: Any, starts: Any, ends: Any, **arguments: Any) -> None:
        self.moved.append((list(objs), list(starts), list(ends), arguments["req_id"]))


class Counted:
    """Memory that was borrowed."""

    def __init__(self) -> None:
        self.references = 1

    def ref_count_down(self) -> None:
        self.references -= 1


def test_a_rank_that_borrows_promises_all_unless_its_weights_are_others():
    engine = Borrowing(None)
    assert engine.lookup(hashes=[1, 2], offsets=[4, 3], lookup_id="r", pin=True) == 7
    engine.refuses_lookups = True
    assert engine.lookup(hashes=[1, 2], offsets=[4, 3], lookup_id="r", pin=True) == 0


def test_a_rank_that_borrows_stores_nothing():
    engine = Borrowing(None)
    engine.store([1, 2], slot_mapping=None)
    assert (engine.moved, engine.failed) == ([], [])


@pytest.mark.parametrize(("owner", "order"), [(None, 0), (object(), 1)])
def test_a_rank_that_borrows_loads_what_it_was_lent_and_gives_it_back(owner: Any, order: int):
    objs = [Counted(), Counted()]
    asked: list[Any] = []

    def borrow(*names: Any) -> Any:
        asked.append(names)
        return objs, [4, 8], [8, 10]

    engine = Borrowing(borrow)
    loaded = engine.retrieve(list(range(12)), None, req_id="r", load_owner=owner)
    assert loaded.tolist() == [False] * 4 + [True] * 6 + [False] * 2
    assert asked == [(order, "r")]
    assert engine.moved == [(objs, [4, 8], [8, 10], "r")]
    assert [obj.references for obj in objs] == [0, 0]


def test_what_could_not_be_borrowed_is_computed():
    def lost(*names: Any) -> Any:
        raise RuntimeError("the first rank has gone")

    engine = Borrowing(lost)
    assert not engine.retrieve([1, 2], None, req_id="r").any()
    [(error, arguments, first)] = engine.failed
    assert "has gone" in str(error)
    assert (arguments["req_id"], first) == ("r", 0)


def test_a_lent_load_ends_for_others_whatever_becomes_of_it_here():
    ended: list[Any] = []
    engine = Borrowing(None)
    engine.borrower = None
    engine.lender = SimpleNamespace(end=lambda *names: ended.append(names), settle=lambda: None)
    engine.lookup_pins = {}
    engine.token_database = None  # so that it raises
    assert not engine.retrieve([1, 2], None, req_id="r").any()
    assert ended == [(0, "r")]
    assert len(engine.failed) == 1
