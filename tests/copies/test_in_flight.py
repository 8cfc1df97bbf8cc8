"""Transfers beside the engine: layer groups, held memory, and what is published when."""

from __future__ import annotations

import itertools
import logging
import threading
from unittest import mock

import pytest
import torch
from support.intel import MACHINES
from support.intel import machine as machine  # a fixture
from support.loads import Case, Point, stored

from lmcache_xpu.copies.in_flight import InFlight, Phase
from lmcache_xpu.copies.load_pipeline import group_starts
from lmcache_xpu.transfer.devices import TransferHandle
from lmcache_xpu.transfer.tuning import tuning_of

IDLE, SCHEDULING, PREPARING, COMPUTING = Phase


def nothing_to_load() -> mock.MagicMock:
    load = mock.MagicMock(**{"bytes_under_way.return_value": 0, "go_on.return_value": 0})
    load.tuning = tuning_of("cuda")
    return load


CALLS = {
    "schedule": lambda step: step.schedule(frozenset(), 1),
    "begin_step": lambda step: step.begin_step(frozenset(), 1),
    "add_load": lambda step: step.add_load(nothing_to_load(), [], lambda seconds: None),
    "hold": lambda step: step.hold(mock.MagicMock(), []),
    "before_all": lambda step: step.before_all(),
    "before_layer": lambda step: step.before_layer(0),
    "after_layer": lambda step: step.after_layer(0),
    "end_step": lambda step: step.end_step(),
    "protect": lambda step: step.protect(None),
    "add_store": lambda step: step.add_store([], stored(), torch.arange(4)),
    "publish": lambda step: step.publish([], list),
    "release": lambda step: step.release([], [], lambda seconds: None),
    "drain": lambda step: step.drain(),
    "close": lambda step: step.close(),
}

# The phase that a call leads to from IDLE, SCHEDULING, PREPARING and COMPUTING; None: an error.
LEADS_TO = {
    "schedule": (SCHEDULING, SCHEDULING, None, None),
    "begin_step": (PREPARING, PREPARING, PREPARING, PREPARING),
    "add_load": (None, SCHEDULING, PREPARING, COMPUTING),
    "hold": (None, SCHEDULING, PREPARING, COMPUTING),
    "before_all": (None, None, PREPARING, COMPUTING),
    "before_layer": (IDLE, None, COMPUTING, COMPUTING),
    "after_layer": (IDLE, None, COMPUTING, COMPUTING),
    "end_step": (IDLE, None, IDLE, IDLE),
    **dict.fromkeys(("protect", "add_store", "publish", "release", "drain", "close"), tuple(Phase)),
}

WAY_TO = {
    IDLE: [],
    SCHEDULING: ["schedule"],
    PREPARING: ["begin_step"],
    COMPUTING: ["begin_step", "before_layer"],
}


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_has_its_phases(call: str, phase: Phase):
    in_flight = InFlight(block_tokens=4)
    for step in WAY_TO[phase]:
        CALLS[step](in_flight)
    assert in_flight.phase is phase
    next_phase = LEADS_TO[call][list(Phase).index(phase)]
    if next_phase is None:
        with pytest.raises(AssertionError, match=f"{call} was called in phase {phase.name}; it"):
            CALLS[call](in_flight)
        assert in_flight.phase is phase
    else:
        CALLS[call](in_flight)
        assert in_flight.phase is next_phase


@pytest.mark.parametrize(
    ("layers", "much", "sizes"),
    [
        (1, True, [1]),
        (6, True, [1, 1, 2, 1, 1]),
        (8, True, [1, 1, 2, 2, 1, 1]),
        (32, True, [1, 1, *[2] * 14, 1, 1]),
        (61, True, [1, 1, *[2] * 28, 1, 1, 1]),
        (1, False, [1]),
        (3, False, [3]),
        (6, False, [6]),
        (32, False, [24, 8]),
        (61, False, [46, 12, 3]),
    ],
)
def test_layer_groups_grow_beside_much_computing_and_shrink_beside_little(layers, much, sizes):
    starts = group_starts(layers, tuning_of("cuda"), much_to_compute=much)
    assert [b - a for a, b in itertools.pairwise([*starts, layers])] == sizes


@pytest.mark.parametrize(
    ("early", "sizes"),
    [
        (1, [1, 1, *[2] * 14, 1, 1]),
        (4, [4, 4, *[2] * 11, 1, 1]),
        (20, [20, 12]),
        (40, [32]),
    ],
)
def test_a_load_that_begins_before_its_step_starts_with_two_large_groups(early: int, sizes):
    starts = group_starts(32, tuning_of("cuda"), much_to_compute=True, early_layers=early)
    assert [b - a for a, b in itertools.pairwise([*starts, 32])] == sizes
    assert group_starts(32, tuning_of("cuda"), much_to_compute=False, early_layers=early) == [0, 24]


@pytest.mark.parametrize(("tokens", "first"), [(None, 1), (4096, 1), (1024, 1), (512, 24), (1, 24)])
def test_what_a_step_computes_decides_the_layer_groups(tokens, first):
    overlap = InFlight(block_tokens=16)
    overlap.begin_step(None, tokens)
    assert overlap.group_starts(32, 32768, 2**27, tuning_of("cuda"))[1] == first


def test_a_store_is_published_when_it_is_complete():
    overlap, move, put = InFlight(block_tokens=4), stored(), threading.Event()
    objs = [object(), object()]
    overlap.add_store(objs, move, torch.arange(4))
    overlap.publish(objs, put.set)
    assert not put.wait(0.05)
    move.transfer.done.reach()
    assert put.wait(10)


def test_what_is_complete_is_published_at_once():
    overlap, called = InFlight(block_tokens=4), []
    objs = [object()]
    overlap.add_store(objs, stored(reached=True), torch.arange(4))
    overlap.publish(objs, lambda: called.append(threading.current_thread()))
    overlap.publish([object()], lambda: called.append(threading.current_thread()))  # not ours
    assert called == [threading.current_thread()] * 2


def test_publishing_that_fails_is_logged_and_the_next_one_goes_on(caplog):
    overlap, done = InFlight(block_tokens=4), threading.Event()
    for put in (lambda: 1 / 0, done.set):
        move = stored()
        objs = [object()]
        overlap.add_store(objs, move, torch.arange(4))
        with caplog.at_level(logging.ERROR):
            overlap.publish(objs, put)
            move.transfer.done.reach()
            overlap.drain()
    assert done.is_set()
    assert "could not finish a transfer" in caplog.text


@MACHINES
def test_memory_is_held_until_the_copy_is_done():
    case = Case()
    moves = [TransferHandle(Point(), Point()), TransferHandle(Point(), Point())]
    took = []
    for obj in case.objs:
        obj.ref_count_up()
    case.overlap.release(case.objs, moves, took.append)
    moves[0].done.reach()
    assert case.held == {2}
    moves[1].done.reach()
    case.overlap.drain()
    assert case.held == {1}
    assert took == [4.0]


@pytest.mark.parametrize(
    ("written", "waits"),
    [(frozenset({7, 2}), 1), (frozenset({0, 3}), 0), (frozenset(), 0), (None, 1)],
)
def test_blocks_that_are_being_read_are_not_written(written, waits: int):
    overlap, move = InFlight(block_tokens=4), stored()
    overlap.add_store([], move, torch.tensor([4, 5, 6, 7, 8, 9]))  # blocks 1 and 2
    overlap.begin_step(written)
    assert move.gathered.waited == waits
    move.gathered.reach()
    overlap.begin_step(None)
    assert move.gathered.waited == waits  # read by now
