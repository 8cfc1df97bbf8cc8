"""Loads inside steps, with an imitated server and real shared memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from prometheus_client import REGISTRY
from support import caches
from support.intel import MACHINES
from support.intel import machine as machine  # a fixture
from support.lending import BLOCKS, chunks_of, filled, succeeds

pytest.importorskip("vllm")
from support.step_loading import (
    LAYERS,
    LOADED,
    OTHERS,
    STORED,
    TIMEOUT_S,
    Engine,
    failures,
    unchanged,
)
from support.step_loading import engine as engine  # a fixture
from support.step_loading import stored as stored  # a fixture

from lmcache_xpu.cache.hit_places import LOCATE, RELEASE
from lmcache_xpu.cache.server import GivenUpError
from lmcache_xpu.copies import step_loads
from lmcache_xpu.copies.load_pipelines import LoadPipeline
from lmcache_xpu.copies.step_loads import StepLoads
from lmcache_xpu.copies.transfer_queue import Transfer
from lmcache_xpu.metrics import LOAD_SERVER

OTHER = 24  # first token of another prompt


def test_each_layer_is_there_when_the_engine_comes_to_it_and_nothing_else_changes(stored):
    assert stored.load() == [True] * len(LAYERS)
    assert unchanged(stored, [block for block in range(BLOCKS) if block not in LOADED])
    assert not stored.loads.take()
    assert not stored.transfers.busy
    assert stored.client.calls[-2:] == [LOCATE, RELEASE]


def test_layers_come_one_after_another(stored):
    """Where all is loaded before the first layer, nothing runs beside the engine."""
    stored.loads.begin_step(LOADED)
    stored.ask()
    stored.begin(tokens=1000)
    last = stored.caches[LAYERS[-1]]
    assert torch.equal(last[LOADED], stored.before[-1][LOADED])
    stored.look(LAYERS[-1], LOADED)
    assert torch.equal(last[LOADED], stored.before[-1][STORED])
    stored.loads.end()


def test_a_step_that_stops_at_no_layer_has_all_before_it_begins(stored):
    stored.load(whole=True, looks=False)
    for layer, was in zip(stored.caches.values(), stored.before, strict=True):
        assert torch.equal(layer[LOADED], was[STORED])
    assert not stored.loads.take()


def test_blocks_that_the_engine_has_are_left_alone(stored):
    stored.load([0, 0, *LOADED[2:]], looks=False, whole=True)
    for layer, was in zip(stored.caches.values(), stored.before, strict=True):
        assert torch.equal(layer[LOADED[2:]], was[STORED[2:]])
    assert unchanged(stored, LOADED[:2])


def test_a_layer_that_was_not_waited_for_is_reported(stored):
    stored.load(layers=LAYERS[:3])
    assert set(stored.loads.take()) == set(LOADED)
    assert stored.loads.take() == set()  # once


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (lambda engine: engine.client.objects.clear(), "missing"),
        (lambda engine: engine.transfers._server.lent.pool.fill_(7), "damaged"),
        (lambda engine: engine.healthy.clear(), "server"),
        (lambda engine: setattr(engine.client, "silent", True), "server"),
    ],
    ids=["missing", "damaged", "lost", "silent"],
)
def test_what_fails_before_the_copy_copies_nothing_and_is_reported(stored, plant, reason):
    count = failures("load", reason)
    plant(stored)
    begin = time.monotonic()
    stored.load(looks=False)
    assert time.monotonic() - begin < 3 * TIMEOUT_S
    assert set(stored.loads.take()) == set(LOADED)
    assert unchanged(stored, range(BLOCKS))
    assert failures("load", reason) == count + 1
    assert stored.transfers.take_damaged() == ({"request"} if reason == "damaged" else set())


def test_the_engine_waits_for_a_server_no_longer_than_it_may(stored, monkeypatch):
    monkeypatch.setattr(step_loads, "ANSWER_S", 0.05)
    stored.client.silent = True
    begin = time.monotonic()
    stored.loads.begin_step(LOADED)
    for name in ("a", "b", "c"):
        stored.ask(request_id=name)
    stored.begin(whole=False)
    assert time.monotonic() - begin < TIMEOUT_S
    assert not stored.healthy.is_set()
    stored.loads.end()
    assert set(stored.loads.take()) == set(LOADED)


def test_what_is_lent_to_another_meanwhile_is_reported(stored):
    count = failures("load", "damaged")
    stored.loads.begin_step(LOADED)
    stored.ask()
    stored.begin(whole=False)
    stored.look(LAYERS[0], LOADED)
    stored.transfers._server.lent.pool.fill_(9)
    for name in LAYERS[1:]:
        stored.look(name, LOADED)
    stored.loads.end()
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "damaged") == count + 1


def test_an_error_while_it_copies_is_reported(stored, monkeypatch):
    monkeypatch.setattr(stored.copies.parts[0].stager, "load", lambda *_, **__: 1 / 0)
    stored.load(looks=False)
    assert set(stored.loads.take()) == set(LOADED)
    assert failures("load", "ZeroDivisionError") >= 1


def test_a_load_that_vllm_never_began_is_reported(stored):
    stored.loads.begin_step(LOADED)
    stored.ask()
    stored.loads.begin_step(())
    assert set(stored.loads.take()) == set(LOADED)


def test_nothing_is_stored_that_came_of_a_failed_load_until_its_blocks_are_written_anew(stored):
    count = failures("store", "unfilled")
    stored.load(layers=[])
    assert not stored.store([22, 23, 24, 25, 26, 27], [*LOADED, 22, 23], first=OTHER)
    assert failures("store", "unfilled") == count + 1
    assert stored.store([22, 23, 24, 25, 26, 27], [22, 23], first=OTHER)
    stored.loads.begin_step(LOADED)
    assert stored.store(LOADED, LOADED, first=48)


@pytest.mark.parametrize("filled", [True, False])
def test_a_store_and_whoever_looks_wait_until_it_is_known(stored, monkeypatch, filled):
    """As on a device, which copies on while the engine goes on."""
    decide, said, decisions = stored.loads._decide, threading.Event(), []
    monkeypatch.setattr(stored.loads, "_decide", lambda *args: decisions.append(args))
    stored.load()
    blocks = stored.loads.take()
    assert stored.transfers.busy
    chunks = chunks_of(LOADED, first=OTHER)
    transfer = stored.transfers.store(chunks, stored.transfers.event(), LOADED)
    if not filled:
        stored.transfers._server.lent.pool.fill_(9)

    def say() -> None:
        said.wait(10)
        for args in decisions:
            decide(*args)

    later = threading.Thread(target=say)
    later.start()
    time.sleep(0.1)
    assert transfer.result is None
    said.set()
    assert set(blocks) == (set() if filled else set(LOADED))
    assert succeeds(transfer) is filled
    later.join()


def test_what_is_still_on_its_way_is_decided_by_a_thread_that_goes_on_after_an_error(
    stored, monkeypatch
):
    """An error there, as of a device that is lost, costs no other load."""
    ends, finish = threading.Event(), stored.transfers.moves.finish
    errors = [RuntimeError("planted")]

    def finished(located):
        if errors:
            raise errors.pop()
        return finish(located)

    monkeypatch.setattr(LoadPipeline, "is_done", property(lambda load: ends.is_set()))
    monkeypatch.setattr(stored.transfers.moves, "finish", finished)
    stored.load()
    first = stored.loads.take()
    stored.loads.begin_step(OTHERS)
    stored.ask(OTHERS)
    stored.begin()
    for name in LAYERS:
        stored.look(name, OTHERS)
    stored.loads.end()
    assert stored.client.calls.count(RELEASE) == 0  # memory is held until then
    ends.set()
    assert set(first) == set(LOADED)
    assert set(stored.loads.take()) == set()


def test_a_step_given_anew_does_not_open_an_earlier_stores_gate(stored):
    stored.load(layers=[])
    gate = stored.loads.outcomes.gate(LOADED)
    stored.loads.begin_step(LOADED)
    with pytest.raises(GivenUpError):
        gate()
    stored.loads.outcomes.gate(LOADED)()


def test_several_loads_of_one_step_fail_one_by_one(stored):
    assert stored.store([22, 23, 24, 25, 26, 27], first=OTHER)
    stored.loads.begin_step([*LOADED, *OTHERS])
    stored.ask(request_id="a")
    stored.ask(OTHERS, request_id="b", first=OTHER, salt="none")
    stored.begin(whole=False)
    for name in LAYERS:
        assert stored.look(name, LOADED)
    stored.loads.end()
    assert set(stored.loads.take()) == set(OTHERS)


def test_loads_are_counted_by_their_way(stored):
    def count(way):
        return REGISTRY.get_sample_value("lmcache_xpu_loads_total", {"way": way})

    before = count("step"), count("async")
    stored.load()
    succeeds(stored.transfers.load(chunks_of(LOADED), stored.transfers.event()))
    assert (count("step"), count("async")) == (before[0] + 1, before[1] + 1)
    assert stored.transfers.moves.take_speed() > 0
    assert stored.transfers.moves.take_speed() is None


def test_layers_that_are_not_alike_come_one_after_another():
    wide = {LAYERS[2]: filled(4, heads=5), LAYERS[4]: filled(5, heads=5)}
    engine = Engine({name: wide.get(name, filled(3)) for name in LAYERS})
    try:
        assert len(engine.copies.parts) == 5
        assert engine.store(STORED)
        assert engine.load() == [True] * len(LAYERS)
        assert not engine.loads.take()
    finally:
        engine.transfers.close()
        engine.client.close()


def test_where_the_engine_does_not_stop_at_all_layers_all_are_there_before_the_step(stored):
    """An indexer of sparse attention has a KV cache, which it reads without a call."""
    transfers = stored.transfers
    loads = StepLoads(transfers.moves, [stored.copies], LAYERS[1:], 0, LOAD_SERVER, print)
    loads.ask(chunks_of(LOADED))
    loads.begin_answered(1000)
    loads.begin(whole=False)
    for layer, was in zip(stored.caches.values(), stored.before, strict=True):
        assert torch.equal(layer[LOADED], was[STORED])
    loads.close()
    assert not loads.take()


@MACHINES
def test_every_layer_is_ordered_before_who_reads_it(machine):
    """The engine reads on its stream, as soon as it comes to a layer; a race would be seen."""
    engine = Engine({name: filled(n).to(caches.DEVICE) for n, name in enumerate(LAYERS)})
    try:
        transfer, chunks = Transfer("request", frozenset(STORED)), chunks_of(STORED)
        event = engine.transfers.event()
        engine.transfers.moves.store(transfer, chunks, event)  # the GPU is this thread's
        assert engine.load() == [True] * len(LAYERS)
        assert not set(engine.loads.take())
        assert unchanged(engine, [block for block in range(BLOCKS) if block not in LOADED])
        engine.load(OTHERS, layers=LAYERS[:3])
        assert set(engine.loads.take()) == set(OTHERS)
    finally:
        engine.transfers.close()
        engine.client.close()
