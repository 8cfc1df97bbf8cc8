"""Questions to the server before the step of a load, which ask where its chunks are."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
from support.step_loading import LAYERS, LOADED, fail_to_name, failures, named
from support.step_loading import engine as engine  # a fixture
from support.step_loading import stored as stored  # a fixture


def test_what_was_asked_before_the_step_is_asked_once(stored):
    stored.client.calls.clear()
    stored.loads.ask_early("request", named)
    stored.loads.begin_step(LOADED)  # ends an earlier step, and not this question
    stored.loads.ask("request", fail_to_name, LOADED)  # nor is the key made again
    stored.loads.end_early()
    stored.loads.begin(4, whole=False)
    assert all(stored.look(name, LOADED) for name in LAYERS)
    stored.loads.end()
    assert not stored.loads.take()
    assert stored.client.calls == ["prepare_retrieve", "commit_retrieve"]


def test_a_chunk_that_can_not_be_named_fails_its_load_alone(stored):
    count = failures("load", "ZeroDivisionError")
    stored.loads.ask_early("request", fail_to_name)
    stored.loads.begin_step(LOADED)
    stored.loads.ask("request", fail_to_name, LOADED)
    stored.loads.begin(4, whole=False)
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


def test_a_server_that_is_lost_before_the_step_fails_the_load_in_it(stored):
    count = failures("load", "server")
    stored.healthy.clear()
    stored.loads.ask_early("request", named)
    stored.load(looks=False)
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "server") == count + 1
