"""A load in the order of the layers: each is there when the engine comes to it."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from support.caches import bits
from support.intel import MACHINES, on_machines
from support.intel import machine as machine  # a fixture
from support.loads import LAYERS, Case, Point, Step, expected, settle
from support.tuned import tuned

from lmcache_xpu.copies.load_pipelines import group_starts
from lmcache_xpu.gpu_connector import base
from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.tuning import TUNING


@pytest.fixture(autouse=True)
def few_layers():
    """Layer groups of 1, 1, 2, 1 and 1 layers, of which the first is enqueued at once."""
    with tuned(first_groups=1, single_layers=2):
        yield


@on_machines("layer_major", here=[False, True], there=[True])
def test_every_layer_is_there_when_the_engine_comes_to_it(layer_major):
    case = Case(layer_major=layer_major)
    case.load()
    (load,) = case.step.loads
    for layer in range(LAYERS):
        case.step.before_layer(layer)
        assert case.there(layer)
    assert case.step.end() == []
    settle()
    assert load.is_done
    assert torch.equal(bits(case.target.raw), bits(expected(case)))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_load_starts_with_its_first_groups(first: int):
    case = Case()
    with tuned(first_groups=first):
        case.load()
    there = [case.there(layer) for layer in range(LAYERS)]
    layers = [0, 1, 2, 4][first]
    assert there == [True] * layers + [False] * (LAYERS - layers)


@MACHINES
def test_later_layers_are_not_copied_before_the_first_are_waited_for():
    """The order is that of the layers; what comes late must not delay what is needed first."""
    case = Case()

    def there() -> int:
        return sum(case.there(layer) for layer in range(LAYERS))

    case.load()
    assert there() == 1
    case.step.before_layer(0)
    assert there() == 1
    case.step.after_layer(0)
    assert there() == 2  # groups of 1, 1 and 2 layers, one more with each layer
    case.step.after_layer(1)
    assert there() == 4
    assert case.step.end() != []


def test_one_more_group_of_each_load_is_enqueued_behind_a_layer():
    first, second = cases = Case(), Case()
    second.step = first.step
    for case in cases:
        case.load()
    for layer in range(LAYERS):
        first.step.before_layer(layer)
        assert all(case.there(layer) for case in cases)
        before = [len(load.done) for load in first.step.loads]
        first.step.after_layer(layer)
        for load, count in zip(first.step.loads, before, strict=True):
            assert len(load.done) == min(count + 1, len(load.starts))
    assert first.step.end() == []


def test_what_is_under_way_is_known_by_its_bytes():
    case = Case()
    case.load()
    (load,) = case.step.loads
    first = load.done[0] = Point()
    assert load.bytes_under_way() == load._groups[0].group.nbytes
    first.reach()
    assert load.bytes_under_way() == 0
    assert case.step.end() != []


def test_what_is_made_in_inference_mode_serves_outside_of_it(monkeypatch):
    """LMCache's calls come in inference mode, vLLM's for each layer may not."""
    monkeypatch.setattr(base, "Stager", functools.partial(Stager, in_place=False))
    case = Case(staging_bytes=SMALLEST_STAGING_BYTES)
    case.load()
    for layer in range(LAYERS):
        case.step.before_layer(layer)
        case.step.after_layer(layer)
    assert case.step.end() == []
    assert torch.equal(bits(case.target.raw), bits(expected(case)))


def test_a_layer_is_there_even_if_nothing_was_enqueued_ahead():
    case = Case()
    case.load()
    case.step.before_layer(2)
    assert case.there(2)
    assert case.there(3)  # of the same group
    assert not case.there(4)


@MACHINES
def test_a_step_that_does_not_stop_at_layers_waits_for_all():
    case = Case()
    case.load()
    case.step.before_all()
    assert all(case.there(layer) for layer in range(LAYERS))
    assert case.step.end() == []


def test_a_load_the_engine_did_not_wait_for_is_reported():
    case = Case()
    case.load()
    loads = list(case.step.loads)
    case.step.before_layer(2)
    assert case.step.end() == loads
    assert all(case.there(layer) for layer in range(LAYERS))  # blocks are not written later
    assert case.step.end() == []  # once


@MACHINES
def test_loads_of_several_requests_share_a_step():
    first, second = Case(), Case()
    second.step = first.step
    first.load()
    second.load()
    for layer in range(LAYERS):
        first.step.before_layer(layer)
        assert first.there(layer)
        assert second.there(layer)
    assert first.step.end() == []


@MACHINES
def test_a_load_that_fails_half_way_is_reported_and_waited_for():
    """A part of a group may be on its way: its blocks and its memory are not given to others."""
    case = Case()
    case.load()
    stager = case.connector.registered()
    fence, real = Point(), stager.load
    stager.fence = lambda: fence

    def broken(*args, **options):
        real(*args, **options)
        raise RuntimeError("half-way")

    stager.load = broken
    case.step.before_layer(0)
    case.step.after_layer(0)
    (load,) = case.step.loads
    assert load.failed_behind == (fence,)
    assert len(load.done) == 1  # the fence is no layer group
    case.step.before_layer(1)
    assert len(load.done) == 1
    assert case.step.end() == [load]
    assert fence.waited
    assert not load.is_done
    fence.reach()
    assert load.is_done


@pytest.mark.parametrize(
    ("visited", "missed"), [(LAYERS - 2, True), (LAYERS - 1, False), (LAYERS, False)]
)
def test_a_drafter_s_layers_are_waited_for_when_vllm_asks_what_failed(visited: int, missed: bool):
    """It asks before the drafter, here of one layer, has run. The model's it must have come to."""
    case = Case()
    case.step = Step(draft_layers=1)
    case.load()
    for layer in range(visited):
        case.step.before_layer(layer)
    assert bool(case.step.end()) is missed
    assert all(case.there(layer) for layer in range(LAYERS))


def test_a_drafter_s_layer_that_can_t_be_loaded_is_reported():
    case = Case()
    case.step = Step(draft_layers=1)
    case.load()
    for layer in range(LAYERS - 1):
        case.step.before_layer(layer)

    def broken(*args, **options):
        raise RuntimeError("planted")

    case.connector.registered().load = broken
    assert len(case.step.end()) == 1


def sizes_of_groups(
    layers: int, *, much: bool = True, early: bool = False, large: int = 1
) -> list[int]:
    """The layers of each group beside much or little computing; `large` fit in one launch."""
    computed, layer_bytes = 1000 if much else 1, TUNING.direct_launch_bytes // large
    starts = group_starts(layers, layer_bytes, loaded=1000, computed=computed, early=early)
    return [b - a for a, b in itertools.pairwise([*starts, layers])]


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
    assert sizes_of_groups(layers, much=much) == sizes


@pytest.mark.parametrize(
    ("large", "sizes"),
    [
        (1, [1, 1, *[2] * 14, 1, 1]),
        (4, [4, 4, *[2] * 11, 1, 1]),
        (20, [20, 12]),
        (40, [32]),
    ],
)
def test_a_load_that_begins_before_its_step_starts_with_two_large_groups(large: int, sizes):
    assert sizes_of_groups(32, early=True, large=large) == sizes
    assert sizes_of_groups(32, much=False, early=True, large=large) == [24, 8]


@pytest.mark.parametrize(("tokens", "first"), [(4096, 1), (1024, 1), (512, 24), (1, 24)])
def test_what_a_step_computes_decides_the_layer_groups(tokens, first):
    starts = group_starts(32, 2**27, loaded=32768, computed=tokens, early=False)
    assert starts[1] == first
