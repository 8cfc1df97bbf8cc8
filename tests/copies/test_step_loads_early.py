"""What is done for a load before its step: questions to the server, and its first layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from support.lending import Answer
from support.step_loading import (
    KEY,
    LAYERS,
    LOADED,
    OTHERS,
    STORED,
    failures,
    unchanged,
)
from support.step_loading import engine as engine  # a fixture
from support.step_loading import stored as stored  # a fixture

from lmcache_xpu.cache.hit_places import LOCATE, RELEASE, sent
from lmcache_xpu.copies import step_loads


def test_a_chunk_that_can_not_be_named_fails_its_load_alone(stored):
    count = failures("load", "ZeroDivisionError")
    stored.loads.begin_step(LOADED)
    stored.ask(named=False)
    stored.begin(whole=False)
    stored.loads.end()
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "ZeroDivisionError") == count + 1


def test_a_server_that_is_lost_before_the_step_fails_the_load_in_it(stored):
    count = failures("load", "server")
    stored.healthy.clear()
    stored.load(looks=False)
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "server") == count + 1


def test_what_needs_no_answer_of_the_server_is_done_while_it_looks(stored, monkeypatch):
    """Of all loads of the step: the server answers one after another."""
    done, moves = [], stored.transfers.moves
    seals, answer = moves._seals, stored.transfers._server.answer

    def sealed(*arguments):
        done.append("sealed")
        return seals(*arguments)

    def answered(*arguments, **how):
        done.append("answered")
        return answer(*arguments, **how)

    monkeypatch.setattr(moves, "_seals", sealed)
    monkeypatch.setattr(stored.transfers._server, "answer", answered)
    stored.loads.begin_step(LOADED + OTHERS)
    for name, blocks in (("first", LOADED), ("second", OTHERS)):
        stored.ask(blocks, request_id=name)
    stored.begin(whole=True)
    stored.loads.end()
    assert done == ["sealed", "sealed", "answered", "answered"]
    for layer, before in zip(stored.caches.values(), stored.before, strict=True):
        assert torch.equal(layer[LOADED], before[STORED])
        assert torch.equal(layer[OTHERS], before[STORED])


def test_a_load_that_can_not_be_planned_costs_no_other(stored, monkeypatch):
    plan, count = stored.copies.beside_layers, failures("load", "ZeroDivisionError")
    monkeypatch.setattr(
        stored.copies,
        "beside_layers",
        lambda chunks, *rest: 1 // 0 if OTHERS[0] in chunks[0] else plan(chunks, *rest),
    )
    stored.loads.begin_step(LOADED + OTHERS)
    for name, blocks in (("first", OTHERS), ("second", LOADED)):
        stored.ask(blocks, request_id=name)
    stored.begin(whole=True)
    stored.loads.end()
    assert set(stored.loads.take()) == set(OTHERS)
    assert failures("load", "ZeroDivisionError") == count + 1
    assert stored.client.calls.count(RELEASE) == 2  # nothing of either is read any more
    assert torch.equal(stored.caches[LAYERS[0]][LOADED], stored.before[0][STORED])


@pytest.fixture
def begun(stored):
    """A step that has been decided on."""
    stored.client.calls.clear()
    stored.loads.begin_step(LOADED)
    stored.ask()
    stored.loads.begin_answered(4, scheduling=True)
    return stored


def test_layers_come_before_a_worker_hears_of_the_step(begun):
    first = begun.caches[LAYERS[0]]
    assert torch.equal(first[LOADED], begun.before[0][STORED])
    begun.begin()
    assert all(begun.look(name, LOADED) for name in LAYERS)
    begun.loads.end()
    assert not begun.loads.take()
    assert not begun.transfers.busy
    assert begun.client.calls == [LOCATE, RELEASE]


def test_a_step_that_vllm_gives_up_before_a_worker_hears_of_it_leaves_nothing(begun):
    begun.loads.begin_step(())  # the next one
    assert not begun.transfers.busy
    assert begun.client.calls == [LOCATE, RELEASE]
    assert set(begun.loads.take()) == set(LOADED)
    assert begun.load() == [True] * len(LAYERS)


def test_a_step_that_loads_nothing_in_the_end_lets_the_next_begin_early(stored, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr(stored.copies, "beside_layers", lambda *_: 1 // 0)
        stored.load(looks=False)
    stored.loads.begin_step(LOADED)
    stored.ask()
    stored.loads.begin_answered(4, scheduling=True)
    stored.begin()
    assert all(stored.look(name, LOADED) for name in LAYERS)


def test_what_the_server_has_not_answered_begins_when_it_has(stored, monkeypatch):
    client, late = stored.client, Answer(comes=False)
    late._result = SimpleNamespace(success=True, payload=sent(client.locate(KEY)))
    monkeypatch.setattr(client, "server_module_call", lambda _: late)
    stored.loads.begin_step(LOADED)
    stored.ask()
    for scheduling in (True, False):
        stored.loads.begin_answered(4, scheduling=scheduling)
        assert unchanged(stored, LOADED)
    late._done.set()
    stored.loads.begin(whole=False)
    assert all(stored.look(name, LOADED) for name in LAYERS)
    stored.loads.end()
    assert not stored.loads.take()


def test_a_load_that_vllm_never_began_is_given_back(stored, monkeypatch):
    stored.client.calls.clear()
    monkeypatch.setattr(stored.transfers._server, "answer", lambda *_, **__: 1 // 0)
    monkeypatch.setattr(step_loads, "SOON_S", 0.0)
    monkeypatch.setattr(Answer, "wait", lambda *_: False)
    stored.loads.begin_step(LOADED)
    stored.ask()
    stored.loads.begin_answered(4)
    stored.loads.end()
    assert stored.client.calls == [LOCATE, RELEASE]
    assert set(stored.loads.take()) == set(LOADED)
