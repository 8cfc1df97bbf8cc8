"""Questions to the server before the step of a load, which ask where its chunks are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
from support.lending import Key
from support.step_loading import (
    KEY,
    LAYERS,
    LOADED,
    OTHERS,
    STORED,
    fail_to_name,
    failures,
    named,
)
from support.step_loading import engine as engine  # a fixture
from support.step_loading import stored as stored  # a fixture


def test_what_was_asked_before_the_step_is_asked_once(stored):
    stored.client.calls.clear()
    stored.loads.ask_early("request", named)
    stored.loads.begin_step(LOADED)  # ends an earlier step, and not this question
    stored.loads.ask("request", fail_to_name, LOADED)  # nor is the key made again
    stored.loads.end_early()
    stored.begin(whole=False)
    assert all(stored.look(name, LOADED) for name in LAYERS)
    stored.loads.end()
    assert not stored.loads.take()
    assert stored.client.calls == ["prepare_retrieve", "commit_retrieve"]


def test_a_chunk_that_can_not_be_named_fails_its_load_alone(stored):
    count = failures("load", "ZeroDivisionError")
    stored.loads.ask_early("request", fail_to_name)
    stored.loads.begin_step(LOADED)
    stored.loads.ask("request", fail_to_name, LOADED)
    stored.begin(whole=False)
    stored.loads.end()
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "ZeroDivisionError") == count + 1


def test_what_was_asked_for_no_step_is_given_back(stored):
    stored.client.calls.clear()
    stored.loads.ask_early("request", named)
    stored.loads.begin_step(())
    stored.loads.end_early()
    assert stored.client.calls == ["prepare_retrieve", "commit_retrieve"]
    assert not stored.loads.busy
    assert stored.load() == [True] * len(LAYERS)  # it is asked anew


def test_a_request_is_asked_for_once_however_often_the_scheduler_says_so(stored):
    stored.client.calls.clear()
    stored.loads.ask_early("request", named)
    stored.loads.ask_early("request", fail_to_name)
    stored.loads.begin_step(())
    stored.loads.end_early()
    assert stored.client.calls == ["prepare_retrieve", "commit_retrieve"]


def test_a_question_of_another_range_fails_its_load_and_writes_nothing(stored):
    count = failures("load", "TransferError")
    part = Key(KEY.tokens, 8, 24)
    stored.loads.ask_early("request", lambda: part)
    stored.load(looks=False)
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "TransferError") == count + 1
    assert not stored.look(LAYERS[0], LOADED)
    assert stored.client.calls.count("commit_retrieve") == 1  # nothing of it is read any more


def test_a_server_that_is_lost_before_the_step_fails_the_load_in_it(stored):
    count = failures("load", "server")
    stored.healthy.clear()
    stored.loads.ask_early("request", named)
    stored.load(looks=False)
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "server") == count + 1


def test_what_needs_no_answer_of_the_server_is_done_while_it_looks(stored, monkeypatch):
    """Of all loads of the step: the server answers one after another."""
    done = []
    plan, answer = stored.copies.beside_layers, stored.transfers._server.answer

    def planned(*arguments):
        done.append("planned")
        return plan(*arguments)

    def answered(*arguments, **how):
        done.append("answered")
        return answer(*arguments, **how)

    monkeypatch.setattr(stored.copies, "beside_layers", planned)
    monkeypatch.setattr(stored.transfers._server, "answer", answered)
    stored.loads.begin_step(LOADED + OTHERS)
    for name, blocks in (("first", LOADED), ("second", OTHERS)):
        stored.loads.ask(name, named, blocks)
    stored.begin(whole=True)
    stored.loads.end()
    assert done == ["planned", "planned", "answered", "answered"]
    for layer, before in zip(stored.caches.values(), stored.before, strict=True):
        assert torch.equal(layer[LOADED], before[STORED])
        assert torch.equal(layer[OTHERS], before[STORED])


def test_a_load_that_can_not_be_planned_costs_no_other(stored, monkeypatch):
    plan, count = stored.copies.beside_layers, failures("load", "ZeroDivisionError")
    monkeypatch.setattr(
        stored.copies,
        "beside_layers",
        lambda chunks, starts: 1 // 0 if OTHERS[0] in chunks[0] else plan(chunks, starts),
    )
    stored.loads.begin_step(LOADED + OTHERS)
    for name, blocks in (("first", OTHERS), ("second", LOADED)):
        stored.loads.ask(name, named, blocks)
    stored.begin(whole=True)
    stored.loads.end()
    assert set(stored.loads.take()) == set(OTHERS)
    assert failures("load", "ZeroDivisionError") == count + 1
    assert stored.client.calls.count("commit_retrieve") == 2  # nothing of either is read any more
    assert torch.equal(stored.caches[LAYERS[0]][LOADED], stored.before[0][STORED])
