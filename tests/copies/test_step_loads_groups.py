"""Loads inside steps of a model with windows: each layer has the blocks of its KV cache group."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support import caches
from support.imitation import GPU
from support.intel import MACHINES
from support.intel import machine as machine  # a fixture
from support.lending import (
    BLOCKS,
    CHUNK,
    Client,
    Connection,
    chunks_of,
    copies,
    filled,
    succeeds,
)

pytest.importorskip("vllm")
from support.step_loading import TIMEOUT_S, failures

from lmcache_xpu.cache.server import GivenUpError
from lmcache_xpu.copies.transfer_queue import Transfer
from lmcache_xpu.copies.transfers import Transfers

# As vLLM has it: layers of one kind are spread over groups, of which each layer shares its memory
# with a layer of every other group.
GROUPS = (("window 0", "window 2"), ("whole 1", "whole 4"), ("window 3", "window 5"))
LAYERS = sorted((name for group in GROUPS for name in group), key=lambda name: name[-1])
WINDOW = 8  # tokens, one chunk
STORED = ([0, 0, 0, 0, 3, 4], [9, 8, 20, 21, 7, 17], [0, 0, 0, 0, 22, 23])
LOADED = ([0, 0, 0, 0, 6, 1], [10, 11, 12, 13, 14, 15], [0, 0, 0, 0, 24, 25])
WRITTEN = {block for blocks in LOADED for block in blocks} - {0}


class Engine:
    """Transfers of a worker, the engine that calls them, and what its blocks held before."""

    def __init__(self) -> None:
        shared = [filled(number).to(caches.DEVICE) for number in range(2)]
        self.layers = {name: shared[at] for names in GROUPS for at, name in enumerate(names)}
        self.group_of = {name: n for n, names in enumerate(GROUPS) for name in names}
        self.groups = [
            copies(
                {name: self.layers[name] for name in names},
                number=number,
                window=None if "whole" in names[0] else WINDOW,
            )
            for number, names in enumerate(GROUPS)
        ]
        self.client = Client()
        self.transfers = Transfers(Connection(self.client), self.groups, TIMEOUT_S, LAYERS)
        self.transfers.register()
        self.loads = self.transfers.in_steps
        self.before = {name: layer.clone() for name, layer in self.layers.items()}
        chunks, event = chunks_of(*STORED), self.transfers.event()
        # On a GPU imitated for this thread.
        self.transfers.moves.store(Transfer("request", frozenset()), chunks, event)

    def load(self, *, visited=LAYERS, kept: int = 0) -> list[bool]:
        """A step that loads; whether each layer was there when the engine came to it."""
        self.loads.begin_step(WRITTEN)
        self.loads.ask(chunks_of(*LOADED, kept=kept))
        self.loads.begin_answered(1000)
        self.loads.begin(whole=False)
        self.there = list[bool]()
        for name in visited:
            self.loads.before_layer(name)
            self.there.append(self.has(name))
            self.loads.after_layer(name)
        self.loads.end()
        return self.there

    def has(self, name: str) -> bool:
        """Whether a layer has what was stored, in all blocks of its group."""
        group, layer, before = self.group_of[name], self.layers[name], self.before[name]
        pairs = zip(LOADED[group], STORED[group], strict=True)
        return all(torch.equal(layer[to], before[of]) for to, of in pairs if to)


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.transfers.close()
    engine.client.close()


@MACHINES
def test_each_layer_has_its_groups_blocks_when_the_engine_comes_to_it(machine):
    engine = Engine()
    assert engine.load() == [True] * len(LAYERS)
    assert not set(engine.loads.take())
    others = [block for block in range(BLOCKS) if block not in WRITTEN]
    for name, layer in engine.layers.items():
        assert torch.equal(layer[others], engine.before[name][others])
    engine.transfers.close()
    engine.client.close()


@MACHINES
def test_a_group_that_is_not_waited_for_is_seen(machine, monkeypatch):
    """What the test above tells right from wrong by; on the host nothing is late."""
    engine = Engine()
    stager = engine.groups[1].parts[0].stager
    load, waited = stager.load, []
    event = SimpleNamespace(wait=lambda: waited.append("whole 1"), reached=lambda: True)
    monkeypatch.setattr(stager, "load", lambda *args, **how: load(*args, **how) and event)
    with nullcontext() if machine is None else pytest.raises(RuntimeError, match="without a wait"):
        engine.load()
    assert waited
    if machine is not None:
        assert len(engine.there) == LAYERS.index("whole 1")
        GPU.here.faults.clear()
    engine.transfers.close()
    engine.client.close()


def test_layers_come_in_the_engines_order_whatever_their_group(engine):
    engine.loads.begin_step(WRITTEN)
    engine.loads.ask(chunks_of(*LOADED))
    engine.loads.begin_answered(1000)
    engine.loads.begin(whole=False)
    seen = [[engine.has(name) for name in LAYERS]]
    for name in LAYERS:
        engine.loads.before_layer(name)
        seen.append([engine.has(name) for name in LAYERS])
    engine.loads.end()
    for there in seen:
        assert there == sorted(there, reverse=True)  # what is there comes first
    assert [sum(there) for there in seen] == [2, 2, 2, 3, 4, 5, 6]


def test_blocks_that_vllm_keeps_are_left_alone_in_each_group(engine):
    engine.load(kept=20)
    for name, layer in engine.layers.items():
        loaded, stored = (blocks[engine.group_of[name]] for blocks in (LOADED, STORED))
        assert torch.equal(layer[loaded[5]], engine.before[name][stored[5]])
        assert torch.equal(layer[loaded[4]], engine.before[name][loaded[4]])
    assert not engine.loads.take()


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_copy_that_fails_in_one_group_leaves_the_blocks_of_all_unfilled(
    engine, monkeypatch, group
):
    count = failures("store", "unfilled")
    stager = engine.groups[group].parts[0].stager
    monkeypatch.setattr(stager, "load", lambda *_, **__: 1 / 0)
    engine.load()
    assert set(engine.loads.take()) == WRITTEN
    with pytest.raises(GivenUpError):
        engine.loads.outcomes.gate(LOADED[1])()
    chunks = chunks_of(*LOADED, first=48)
    assert not succeeds(engine.transfers.store(chunks, engine.transfers.event(), LOADED[1]))
    assert failures("store", "unfilled") == count + 1


def test_a_step_that_left_before_the_last_layer_of_a_window_is_reported(engine):
    engine.load(visited=LAYERS[:-1])
    assert set(engine.loads.take()) == WRITTEN


# States beside attention

STATE_STORED, STATE_LOADED = [0, 8, 21], [0, 0, 19]  # a block is a chunk


class States:
    """Transfers of a worker with a layer of attention and one that keeps a state."""

    def __init__(self) -> None:
        self.attention = filled(0).to(caches.DEVICE)
        self.page = filled(1).to(caches.DEVICE).reshape(BLOCKS, -1).contiguous()
        state = [
            self.page.as_strided((BLOCKS, 8), (48, 1)),
            self.page.as_strided((BLOCKS, 3), (48, 1), 9),
        ]
        groups = [
            copies({"attention": self.attention}),
            copies({"state": state}, number=1, window=CHUNK, recurrent=True, block_tokens=CHUNK),
        ]
        self.client = Client()
        self.transfers = Transfers(Connection(self.client), groups, TIMEOUT_S, ["attention"])
        self.transfers.register()
        self.loads = self.transfers.in_steps
        self.before = self.attention.clone(), self.page.clone()
        chunks = chunks_of(STORED[1], STATE_STORED)
        transfer = Transfer("request", frozenset())
        self.transfers.moves.store(transfer, chunks, self.transfers.event())

    def begin(self, *, ahead: bool) -> None:
        """Begin a step that loads, as a scheduler in the worker's process does or not."""
        self.loads.begin_step({*LOADED[1], 19})
        self.loads.ask(chunks_of(LOADED[1], STATE_LOADED))
        self.loads.begin_answered(1000, scheduling=ahead)

    def has_state(self) -> bool:
        page, before = self.page[19], self.before[1][21]
        return torch.equal(page[:8], before[:8]) and torch.equal(page[9:12], before[9:12])

    def close(self) -> None:
        self.transfers.close()
        self.client.close()


@MACHINES
def test_a_state_is_there_before_the_worker_prepares_the_step_and_attention_at_its_layer(machine):
    engine = States()
    engine.begin(ahead=True)
    assert engine.has_state()  # as vLLM copies it on, which waits for no layer
    engine.loads.begin_answered(1000)
    engine.loads.begin(whole=False)
    engine.loads.before_layer("attention")
    assert torch.equal(engine.attention[LOADED[1]], engine.before[0][STORED[1]])
    engine.loads.after_layer("attention")
    engine.loads.end()
    assert not set(engine.loads.take())
    engine.close()


def test_a_load_of_states_that_begins_with_its_step_has_failed():
    engine = States()
    engine.begin(ahead=False)
    engine.loads.begin(whole=False)
    engine.loads.end()
    assert set(engine.loads.take()) == {*LOADED[1], 19}
    assert torch.equal(engine.page, engine.before[1])
    engine.close()


def test_a_state_that_can_not_be_copied_leaves_all_blocks_unfilled(monkeypatch):
    engine = States()
    stager = engine.transfers.groups[1].parts[0].stager
    monkeypatch.setattr(stager, "load", lambda *_, **__: 1 / 0)
    engine.begin(ahead=True)
    engine.loads.begin(whole=False)
    engine.loads.end()
    assert set(engine.loads.take()) == {*LOADED[1], 19}
    engine.close()
