"""Errors of LMCache's engine end in blocks to recompute; its protocols go on to their ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmcache_xpu.cache_engine.engine import Guard

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


class Engine:
    """LMCache's engine: what it does is given by each test."""

    def __init__(self, *, layerwise, groups):
        self.use_layerwise = layerwise
        self.num_layers = LAYERS
        self.retrieve_locations = None
        self.storage_manager = Manager()
        self.token_database = SimpleNamespace(process_tokens=self.keys)
        self.gpu_connector = SimpleNamespace(
            failed_slots=[], overlap=None, batched_to_gpu=self.to_gpu, groups=groups
        )
        self.fails = False
        self.fails_at = None
        self.steps = 0  # that a generator has begun
        self.found = len(TOKENS)

    def keys(self, tokens, mask=None):
        return [(i, i + CHUNK, Key(i)) for i in range(0, len(tokens), CHUNK)]

    def to_gpu(self, *args, **kwargs):
        if self.fails:
            raise RuntimeError("planted")

    def retrieve(self, tokens, mask, **kwargs):
        self.to_gpu()
        return mask

    store = to_gpu

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
            yield retrieved.sum() if step == 0 and held else None
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


def guarded(*, layerwise=False, groups=ONE_BY_ONE):
    engine = Engine(layerwise=layerwise, groups=groups)
    adapter = SimpleNamespace(
        lmcache_engine=engine, _invalid_block_ids=set(), _layerwise_save_storers={}
    )
    return engine, Guard(adapter, BLOCK), adapter


def hold(engine, tier, *chunks):
    for chunk in chunks:
        engine.storage_manager.tier(tier).update((chunk * CHUNK, i) for i in range(LAYERS))


def load(engine):
    return list(engine.retrieve_layer(TOKENS, MASK, slot_mapping=SLOTS))


def request(slots=SLOTS):
    spec = SimpleNamespace(can_save=True)
    return SimpleNamespace(req_id="r", slot_mapping=slots, save_spec=spec, token_ids=TOKENS)


@pytest.mark.parametrize("cached", [0, 6])
def test_a_failed_load_reports_its_blocks_but_those_that_the_engine_has(cached):
    engine, guard, _ = guarded()
    engine.fails = True
    kwargs = {"slot_mapping": SLOTS, "vllm_cached_tokens": cached}
    engine.gpu_connector.batched_to_gpu([], [0, CHUNK], [CHUNK, 2 * CHUNK], **kwargs)
    assert guard.take_unfilled() == set(range(10 + cached // BLOCK, 16))
    assert guard.take_unfilled() == set()


def test_what_lmcache_itself_raises_is_a_load_of_nothing():
    engine, guard, _ = guarded()
    engine.fails = True
    assert not engine.retrieve(TOKENS, MASK, slot_mapping=SLOTS).any()
    assert guard.take_unfilled() == set(range(10, 16))


def test_a_failed_store_is_left_out():
    engine, guard, _ = guarded()
    engine.fails = True
    engine.store(TOKENS, mask=MASK)
    assert guard.take_unfilled() == set()


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_step_stores_nothing_that_read_an_unfilled_block(asked_first):
    engine, guard, _ = guarded()
    reader, other = request(), request(SLOTS + 100)
    guard.begin_step(None)
    engine.gpu_connector.failed_slots.append(SLOTS[-BLOCK:])
    if asked_first:  # vLLM may ask for the blocks before it completes the stores
        assert guard.take_unfilled() == {15}
    guard.withhold([reader, other])
    assert (reader.save_spec.can_save, other.save_spec.can_save) == (False, True)
    guard.begin_step(None)
    assert guard.take_unfilled() == (set() if asked_first else {15})


@pytest.mark.parametrize(
    ("written", "stored"), [(None, False), (frozenset({14}), False), (frozenset({15}), True)]
)
def test_nor_does_a_later_one_until_the_block_is_given_away(written, stored):
    """With asynchronous scheduling the next step was on its way when the load failed."""
    engine, guard, _ = guarded()
    guard.begin_step(None)
    engine.gpu_connector.failed_slots.append(SLOTS[-BLOCK:])
    guard.withhold([request()])
    assert guard.take_unfilled() == {15}
    following = request()
    guard.begin_step(written)
    guard.withhold([following])
    assert following.save_spec.can_save == stored
    assert guard.take_unfilled() == set()  # vLLM knows of it


def test_loads_that_lmcache_reports_count_as_well():
    _, guard, adapter = guarded()
    adapter._invalid_block_ids.add(12)
    reader = request()
    guard.withhold([reader])
    assert not reader.save_spec.can_save


def test_a_layerwise_load_passes_through():
    engine, guard, _ = guarded(layerwise=True)
    hold(engine, "cpu", 0, 1, 2)
    steps = load(engine)
    assert len(steps) == LAYERS + 2
    assert steps[-1].all()
    assert guard.take_unfilled() == set()


GROUPS = [(0, 3), (3, 6), (6, 8)]  # of a model with eight layers; LMCache knows of three


def test_layers_that_move_together_are_loaded_before_the_first_of_them():
    """Two steps at the start of the engine's step, then one before each layer."""
    engine, guard, _ = guarded(layerwise=True, groups=GROUPS)
    hold(engine, "cpu", 0, 1, 2)
    seen = []
    for found in engine.retrieve_layer(TOKENS, MASK, slot_mapping=SLOTS):
        seen.append(engine.steps)
        last = found
    assert seen == [1, 2, 3, 3, 3, 4, 4, 4, 5, 5]  # step g + 3 waits for group g
    assert last.all()
    assert guard.take_unfilled() == set()


def test_layers_that_move_together_are_stored_behind_the_last_of_them():
    """Calls are for layers 0 to 7, and for the end."""
    engine, _, _ = guarded(layerwise=True, groups=GROUPS)
    seen = [engine.steps for _ in engine.store_layer(TOKENS, mask=MASK)]
    assert seen == [0, 0, 1, 1, 1, 2, 2, 3, 4]  # step g + 1 stores group g


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layerwise_load_that_raises_goes_on_to_its_end(layer):
    engine, guard, _ = guarded(layerwise=True)
    hold(engine, "cpu", 0, 1, 2)
    engine.fails_at = layer
    steps = load(engine)
    assert len(steps) == LAYERS + 2
    assert not steps[-1].any()
    assert guard.take_unfilled() == set(range(10, 16))


def test_a_layerwise_load_that_finds_less_reports_the_rest():
    engine, guard, _ = guarded(layerwise=True)
    hold(engine, "cpu", 0, 1)
    assert load(engine)[-1].sum() == 2 * CHUNK
    assert guard.take_unfilled() == {14, 15}


def test_a_layerwise_load_that_finds_nothing_ends_well():
    engine, guard, _ = guarded(layerwise=True)
    steps = load(engine)
    assert len(steps) == LAYERS + 2
    assert not steps[-1].any()
    assert guard.take_unfilled() == set(range(10, 16))


def test_a_prefix_in_two_tiers_comes_from_the_one_that_has_more():
    engine, guard, _ = guarded(layerwise=True)
    hold(engine, "cpu", 0)
    hold(engine, "disk", 0, 1)
    assert load(engine)[-1].sum() == 2 * CHUNK
    assert engine.retrieve_locations is None
    assert guard.take_unfilled() == {14, 15}


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_a_layerwise_store_that_raises_leaves_no_part_of_a_chunk(layer):
    """LMCache asks for the first layer alone, and would never store the rest."""
    engine, _, _ = guarded(layerwise=True)
    engine.fails_at = layer
    assert len(list(engine.store_layer(TOKENS, mask=MASK))) == LAYERS + 1
    assert engine.storage_manager.tier("cpu") == set()


def test_a_layerwise_store_from_an_unfilled_block_is_taken_back():
    engine, guard, adapter = guarded(layerwise=True)
    storer = engine.store_layer(TOKENS, mask=MASK)
    for _ in range(LAYERS):
        next(storer)
    assert engine.storage_manager.tier("cpu")
    adapter._layerwise_save_storers["r"] = storer
    engine.gpu_connector.failed_slots.append(SLOTS[:1])
    guard.withhold([request()])
    assert engine.storage_manager.tier("cpu") == set()
    assert adapter._layerwise_save_storers == {}
