"""Loads that begin before their step, in a worker's half; test_early_loads has the scheduler's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from support.halves import Adapter, worker_side

from lmcache_xpu.kv_connector.step_metadata import StepMetadata


class Beside:
    """What runs beside the engine, as far as a load that begins early tells it."""

    loading = True

    def __init__(self, *, loads: bool = True) -> None:
        self.loads, self.told = loads, []

    def schedule(self, written: frozenset[int], tokens: int) -> None:
        self.told.append((written, tokens))

    def begin_step(self, *facts: Any) -> None:
        """Go on with what began."""


def of_request(name: str, *, can_load: bool = True) -> SimpleNamespace:
    spec = SimpleNamespace(can_load=can_load)
    return SimpleNamespace(req_id=name, load_spec=spec, save_spec=None)


def load_of_one() -> StepMetadata:
    return StepMetadata([of_request("early")], new_blocks=frozenset({3}), tokens=5)


def test_a_load_begins_between_two_steps_and_leaves_no_trace_of_one():
    adapter, beside = Adapter(), Beside()
    metadata = load_of_one()
    assert worker_side(adapter, in_flight=beside).begin_load(metadata)
    assert adapter.seen == [("load", (metadata, {}))]
    assert beside.told == [({3}, 5)]
    assert adapter.step is None


def test_what_began_early_is_not_loaded_again_by_its_step():
    side = worker_side(adapter := Adapter(), in_flight=Beside())
    side.begin_load(load_of_one())
    step = StepMetadata(
        [of_request("early"), of_request("late"), of_request("not yet", can_load=False)]
    )
    specs = [each.load_spec for each in step.requests]
    side.begin_step(step)
    assert [each.load_spec for each in step.requests] == [None, *specs[1:]]
    assert [what for what, _ in adapter.seen] == ["load", "load"]
    side.clear()
    side.begin_step(again := StepMetadata([of_request("early")]))  # after a preemption
    assert again.requests[0].load_spec is not None
    assert len(adapter.seen) == 3


def test_ranks_that_share_a_tier_come_together_before_they_load():
    side = worker_side(adapter := Adapter(), in_flight=Beside(), sharing=lambda engine: None)
    assert not side.begin_load(load_of_one())
    side.bind(StepMetadata([]))
    side.clear()
    assert adapter.seen == []


@pytest.mark.parametrize(
    ("loads_early", "in_flight", "layerwise", "under_way"),
    [
        (False, Beside(), False, None),  # vLLM zeroes blocks when it prepares the step
        (True, None, False, None),
        (True, Beside(loads=False), False, None),
        (True, Beside(), True, None),
        (True, Beside(), False, StepMetadata([])),
    ],
)
def test_a_load_that_must_wait_for_its_step_does_not_begin(
    loads_early, in_flight, layerwise, under_way
):
    adapter = Adapter(use_layerwise=layerwise)
    adapter.step = under_way
    side = worker_side(adapter, in_flight=in_flight, loads_early=loads_early)
    assert not side.begin_load(load_of_one())
    assert adapter.seen == []


def test_a_load_that_other_weights_have_outdated_does_not_begin():
    side = worker_side(adapter := Adapter(), in_flight=Beside())
    side.epoch.change_weights()
    assert not side.begin_load(load_of_one())
    assert adapter.seen == []
    assert adapter.lmcache_engine.refuses_lookups
