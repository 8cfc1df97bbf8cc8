"""A load in the order of the layers: each is there when the engine comes to it."""

from __future__ import annotations

import functools

import pytest
import torch
from support import caches
from support.caches import bits
from support.intel import MACHINES, on_machines
from support.intel import machine as machine  # a fixture
from support.loads import LAYERS, Case, Point, expected, settle
from support.tuned import tuned

from lmcache_xpu.copies.load_pipeline import group_starts
from lmcache_xpu.gpu_connector import registered_cache
from lmcache_xpu.transfer.devices import TransferHandle
from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.tuning import tuning_of


@pytest.fixture(autouse=True)
def few_layers():
    """Layer groups of 1, 1, 2, 1 and 1 layers, of which the first is enqueued at once."""
    with tuned(first_groups=1, single_layers=2):
        yield


@on_machines("layer_major", here=[False, True], there=[True])
def test_every_layer_is_there_when_the_engine_comes_to_it(layer_major):
    case = Case(layer_major=layer_major)
    case.load()
    assert case.held == {2}  # LMCache lets go of its own reference when the call returns
    for layer in range(LAYERS):
        case.overlap.before_layer(layer)
        assert case.there(layer)
    assert case.overlap.end_step() == []
    settle()
    case.overlap.drain()
    assert case.held == {1}
    assert torch.equal(bits(case.target.raw), bits(expected(case)))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_load_starts_with_its_first_groups(first: int):
    case = Case()
    with tuned(first_groups=first):
        case.load()
    there = [case.there(layer) for layer in range(LAYERS)]
    starts = group_starts(LAYERS, tuning_of(caches.DEVICE), much_to_compute=True)
    layers = [*starts, LAYERS][first]
    assert there == [True] * layers + [False] * (LAYERS - layers)


@MACHINES
def test_later_layers_are_not_copied_before_the_first_are_waited_for():
    """The order is that of the layers; what comes late must not delay what is needed first."""
    case = Case()

    def there() -> int:
        return sum(case.there(layer) for layer in range(LAYERS))

    case.load()
    assert there() == 1
    case.overlap.before_layer(0)
    assert there() == 1
    case.overlap.after_layer(0)
    assert there() == 2  # groups of 1, 1 and 2 layers, one more with each layer
    case.overlap.after_layer(1)
    assert there() == 4
    assert case.overlap.end_step() != []


@pytest.mark.parametrize(("room", "groups"), [(1, 1), (10**9, 2)])
def test_behind_a_layer_no_more_is_enqueued_than_the_link_has_room_for(room: int, groups: int):
    """Of the load that has the fewest first; the engine finds its layers there all the same."""
    first, second = cases = Case(), Case()
    second.overlap = first.overlap
    for case in cases:
        case.load()
    first.overlap.before_layer(0)
    for behind in range(2):
        before = sum(item.load.enqueued for item in first.overlap._loads)
        with tuned(ahead_bytes=room):
            first.overlap.after_layer(behind)
        enqueued = [item.load.enqueued for item in first.overlap._loads]
        assert sum(enqueued) - before == groups
        assert max(enqueued) - min(enqueued) <= 1
    for layer in range(1, LAYERS):
        first.overlap.before_layer(layer)
        assert all(case.there(layer) for case in cases)
        first.overlap.after_layer(layer)
    assert first.overlap.end_step() == []


def test_what_is_under_way_leaves_less_room():
    case = Case()
    case.load()
    (item,) = case.overlap._loads
    size = item.load._groups[0][0].nbytes
    first = item.load._handles[0] = TransferHandle(Point(True), Point())
    assert item.load.bytes_under_way() == size
    case.overlap.before_layer(0)
    with tuned(ahead_bytes=size):
        case.overlap.after_layer(0)
    assert item.load.enqueued == 1
    first.done.reach()
    assert item.load.bytes_under_way() == 0
    case.overlap.after_layer(0)
    assert item.load.enqueued == 2
    assert case.overlap.end_step() != []


def test_what_is_made_in_inference_mode_serves_outside_of_it(monkeypatch):
    """LMCache's calls come in inference mode, vLLM's for each layer may not."""
    monkeypatch.setattr(registered_cache, "Stager", functools.partial(Stager, in_place=False))
    case = Case(staging_bytes=SMALLEST_STAGING_BYTES)
    case.load()
    for layer in range(LAYERS):
        case.overlap.before_layer(layer)
        case.overlap.after_layer(layer)
    assert case.overlap.end_step() == []
    assert torch.equal(bits(case.target.raw), bits(expected(case)))


def test_a_layer_is_there_even_if_nothing_was_enqueued_ahead():
    case = Case()
    case.load()
    case.overlap.before_layer(2)
    assert case.there(2)
    assert case.there(3)  # of the same group
    assert not case.there(4)


@MACHINES
def test_a_step_that_does_not_stop_at_layers_waits_for_all():
    case = Case()
    case.load()
    case.overlap.before_all()
    assert all(case.there(layer) for layer in range(LAYERS))
    assert case.overlap.end_step() == []


def test_a_load_the_engine_did_not_wait_for_is_reported():
    case = Case()
    case.load()
    case.overlap.before_layer(2)
    (missed,) = case.overlap.end_step()
    assert torch.equal(missed, case.slots)
    assert all(case.there(layer) for layer in range(LAYERS))  # blocks are not written later
    case.overlap.drain()
    assert case.held == {1}
    assert case.overlap.end_step() == []  # once


@MACHINES
def test_loads_of_several_requests_share_a_step():
    first, second = Case(), Case()
    second.overlap = first.overlap
    first.load()
    second.load()
    for layer in range(LAYERS):
        first.overlap.before_layer(layer)
        assert first.there(layer)
        assert second.there(layer)
    assert first.overlap.end_step() == []


@MACHINES
def test_a_load_that_fails_half_way_is_reported_and_waited_for():
    """A part of a group may be on its way: its blocks and its memory are not given to others."""
    case = Case()
    case.load()
    stager = case.connector.registered().stager
    fence, real = TransferHandle(Point(), Point()), stager.load
    stager.fence = lambda: fence

    def broken(*args, **options):
        real(*args, **options)
        raise RuntimeError("half-way")

    stager.load = broken
    case.overlap.before_layer(0)
    case.overlap.after_layer(0)
    (item,) = case.overlap._loads
    assert item.load.failed_behind is fence
    assert item.load.enqueued == 1  # the fence is no layer group
    assert item.load.handles()[-1].done is fence.done
    case.overlap.before_layer(1)
    assert item.load.enqueued == 1
    (missed,) = case.overlap.end_step()
    assert torch.equal(missed, case.slots)
    assert fence.done.waited
    assert case.held == {2}
    fence.done.reach()
    case.overlap.drain()
    assert case.held == {1}


@pytest.mark.parametrize(
    ("visited", "missed"), [(LAYERS - 2, True), (LAYERS - 1, False), (LAYERS, False)]
)
def test_a_drafter_s_layers_are_waited_for_when_vllm_asks_what_failed(visited: int, missed: bool):
    """It asks before the drafter, here of one layer, has run. The model's it must have come to."""
    case = Case()
    case.overlap.model_layers = LAYERS - 1
    case.load()
    for layer in range(visited):
        case.overlap.before_layer(layer)
    assert bool(case.overlap.end_step()) is missed
    assert all(case.there(layer) for layer in range(LAYERS))


def test_a_drafter_s_layer_that_can_t_be_loaded_is_reported():
    case = Case()
    case.overlap.model_layers = LAYERS - 1
    case.load()
    for layer in range(LAYERS - 1):
        case.overlap.before_layer(layer)

    def broken(*args, **options):
        raise RuntimeError("planted")

    case.connector.registered().stager.load = broken
    (missed,) = case.overlap.end_step()
    assert torch.equal(missed, case.slots)
