"""Errors of LMCache's engine end in blocks to recompute; its protocols go on to their ends."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from lmcache_xpu.cache_engine.engine import CacheEngine
from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.versions.lmcache import LMCacheEngine

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
