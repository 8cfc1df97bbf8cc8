"""The worker's half of the connector: what LMCache is told, where vLLM and LMCache disagree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from support.halves import BLOCK, Adapter, Facade, worker_side

from lmcache_xpu.kv_connector import worker
from lmcache_xpu.kv_connector.step_metadata import IDLE_S, StepMetadata
from lmcache_xpu.kv_connector.worker import WorkerSide

STEP = {"attention": "of the step"}


def step(*can_load: bool | None) -> StepMetadata:
    """A step of requests that have something to load, have nothing yet, or never had (None)."""
    specs = [None if can is None else SimpleNamespace(can_load=can) for can in can_load]
    return StepMetadata(
        [
            SimpleNamespace(req_id=str(number), load_spec=spec, save_spec=None)
            for number, spec in enumerate(specs)
        ]
    )


@pytest.mark.parametrize(
    ("can_load", "in_context", "arguments", "seen"),
    [
        ((True,), STEP, {}, STEP),
        ((True,), None, {"attn_metadata": STEP}, STEP),
        # A step that is one graph, up to vLLM 0.26: LMCache would skip the load, and the engine
        # compute from whatever the blocks hold. Seen on a card: no block of a hit was restored.
        ((None, True), None, {}, {}),
        ((None, False), None, {}, None),
    ],
)
def test_a_load_is_not_skipped_for_want_of_attention_metadata(
    can_load, in_context, arguments, seen
):
    side = worker_side(adapter := Adapter())
    side.bind(metadata := step(*can_load))
    context: Any = SimpleNamespace(attn_metadata=in_context)
    side.start_load(context, arguments)
    assert adapter.seen == [("load", (metadata, seen))]
    assert context.attn_metadata == in_context


def begin_two_steps(side: WorkerSide) -> list[Any]:
    """The calls in which vLLM makes a step, twice; what LMCache was told to load."""
    adapter: Any = side._adapter
    facade = Facade(worker=side)
    for _ in range(2):
        metadata = step(True)
        facade.begin_step(metadata)
        adapter.seen.append(("prepared", ()))
        facade.bind_connector_metadata(metadata)
        facade.start_load_kv(SimpleNamespace(attn_metadata=STEP))
        facade.end_enqueueing()
        facade.clear_connector_metadata()
    return adapter.seen


def test_a_step_loads_once_and_before_vllm_prepares_it():
    (_, first), (prepared, _), (_, second), (prepared_again, _) = begin_two_steps(worker_side())
    assert (prepared, prepared_again) == ("prepared", "prepared")
    assert first[0] is not second[0]
    assert (first[1], second[1]) == ({}, {}), "LMCache skips a load without attention metadata"


def test_blocks_that_vllm_zeroes_are_loaded_after_that():
    seen = begin_two_steps(worker_side(loads_early=False))
    assert [what for what, _ in seen] == ["prepared", "load"] * 2


def test_a_step_begins_once(monkeypatch):
    began: list[Any] = []
    in_flight = SimpleNamespace(begin_step=lambda *facts: began.append(facts), loading=False)
    monkeypatch.setattr(worker, "may_run_as_one_graph", lambda *args: False)
    begin_two_steps(worker_side(in_flight=in_flight))
    assert len(began) == 2


@pytest.mark.parametrize(
    ("loads", "layerwise", "looked"),
    [(False, False, False), (True, False, True), (False, True, True)],
    ids=["quiet", "loads", "layerwise"],
)
def test_at_a_layer_nothing_is_done_where_nothing_is_loaded_and_no_layer_stored(
    loads: bool, layerwise: bool, looked: bool
):
    """A load may have begun before its step; then the step describes none."""
    calls: list[tuple[str, int]] = []
    in_flight = SimpleNamespace(
        begin_step=lambda *facts: None,
        loading=loads,
        before_layer=lambda layer: calls.append(("before", layer)),
        after_layer=lambda layer: calls.append(("after", layer)),
    )
    adapter = Adapter(use_layerwise=layerwise)
    side = worker_side(adapter, in_flight=in_flight, layers=("a", "b"))
    facade = Facade(worker=side)
    assert not facade.has_connector_metadata()
    facade.begin_step(StepMetadata([], new_blocks=frozenset()))
    assert facade.has_connector_metadata() == looked  # else vLLM does not call these
    side.wait_for_layer("b")
    side.save_layer("b", None, None)
    seen = [("wait", "b"), ("save", "b")] if looked else []
    assert adapter.seen == seen
    assert calls == ([("before", 1), ("after", 1)] if looked else [])


@pytest.mark.parametrize(
    ("tokens", "fetching", "told", "waits"),
    [
        (0, True, set(), True),
        (5, True, set(), False),
        (0, False, set(), False),
        (0, True, {"a"}, 0),
    ],
)
def test_a_step_without_tokens_leaves_the_thread_that_fetches_its_time(
    monkeypatch, tokens: int, fetching: bool, told: set[str], waits: bool
):
    slept: list[float] = []
    monkeypatch.setattr(worker.time, "sleep", slept.append)
    side = worker_side()
    side.queue = SimpleNamespace(move=lambda: told, fetching=fetching)
    side._adapter.bind(StepMetadata([], tokens=tokens))
    assert side.arrived() == told
    assert slept == [IDLE_S] * waits


@pytest.mark.parametrize("setting", [None, "remote_storage_plugins", "remote_url"])
def test_a_worker_whose_tier_may_take_long_is_not_called(setting: str | None):
    adapter = Adapter()
    if setting is not None:
        setattr(adapter.config, setting, "a server")
    near = worker_side(adapter).near_engine()
    assert near is (None if setting else adapter.lmcache_engine)


class Calls:
    """A step with a drafter's layer behind two of the model."""

    def __init__(self) -> None:
        in_flight = SimpleNamespace(
            begin_step=lambda *facts: None,
            before_layer=lambda layer: None,
            after_layer=lambda layer: None,
            end_step=list,
        )
        self.adapter = Adapter()
        layers = ("model.0", "model.1", "draft")
        self.side = worker_side(self.adapter, in_flight=in_flight, layers=layers)
        self.side.bind(step())

    def forward(self, *layers: str) -> None:
        for layer in layers:
            self.side.wait_for_layer(layer)
            self.side.save_layer(layer, None, None)


def test_lmcache_hears_of_each_layer_once_however_many_tokens_are_drafted():
    """It counts calls: one more ends its generators, and with them the engine."""
    calls = Calls()
    calls.forward("model.0", "model.1", "draft", "draft", "draft")
    calls.side.wait_for_save()
    each = [(name, layer) for layer in calls.side.layers.numbers for name in ("wait", "save")]
    assert calls.adapter.seen == [*each, ("save", "")]


def test_a_step_without_its_drafter_stores_whole_chunks():
    calls = Calls()
    calls.forward("model.0", "model.1")
    calls.side.wait_for_save()
    assert calls.adapter.seen[-2:] == [("save", "draft"), ("save", "")]


def test_a_step_that_computes_nothing_stores_nothing():
    calls = Calls()
    calls.side.wait_for_save()
    assert calls.adapter.seen == [("save", "")]


SLOTS = torch.arange(24) + 10 * BLOCK  # blocks 10 to 15


def request(slots: torch.Tensor = SLOTS) -> Any:
    spec = SimpleNamespace(can_save=True)
    return SimpleNamespace(req_id="r", slot_mapping=slots, save_spec=spec, load_spec=None)


@pytest.mark.parametrize("reporter", ["connector", "LMCache", "in flight"])
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_step_stores_nothing_that_read_an_unfilled_block(asked_first: bool, reporter: str):
    adapter, missed = Adapter(), []
    in_flight = SimpleNamespace(begin_step=lambda *facts: None, end_step=lambda: [*missed])
    side = worker_side(adapter, in_flight=in_flight)
    reader, other = request(), request(SLOTS + 100)
    side.bind(StepMetadata([reader, other]))
    if reporter == "connector":
        adapter.lmcache_engine.gpu_connector.failed_slots.append(SLOTS[-BLOCK:])
    elif reporter == "LMCache":
        adapter.invalid.add(15)
    else:
        missed.append(SLOTS[-BLOCK:])
    if asked_first:  # vLLM may ask for the blocks before it completes the stores
        assert side.take_unfilled() == {15}
        missed.clear()
    side.wait_for_save()
    missed.clear()
    assert adapter.dropped == [reader]
    side.clear()
    assert side.take_unfilled() == (set() if asked_first else {15})


class OtherRank:
    """A rank of which some blocks are unfilled."""

    def __init__(self, *blocks: int) -> None:
        self.blocks, self.heard = set(blocks), []

    def union(self, numbers: set[int]) -> set[int]:
        self.heard.append(set(numbers))
        return numbers | self.blocks


def loading(slots: torch.Tensor) -> Any:
    described = request(slots)
    described.load_spec = SimpleNamespace(can_load=True)
    return described


def test_a_load_that_failed_on_another_rank_counts_here_until_its_blocks_are_given_anew():
    adapter, other = Adapter(), OtherRank(15)
    side = worker_side(adapter, ranks=other)

    def store(described: Any, *new_blocks: int) -> bool:
        side.bind(StepMetadata([described], new_blocks=frozenset(new_blocks)))
        side.wait_for_save()
        side.clear()
        return not adapter.dropped or adapter.dropped.pop() is not described

    assert not store(loading(SLOTS))
    other.blocks.clear()
    assert not store(request())  # vLLM may schedule it once more before it hears of the failure
    assert store(request(), 15)
    assert side.take_unfilled() == set()  # the other rank reports it
    assert other.heard == [set()]


def test_ranks_tell_each_other_of_steps_that_load_alone_whatever_becomes_of_the_loads():
    """All of them ask, or each would wait for the others: the description is the same for all."""
    adapter, other = Adapter(), OtherRank()
    side = worker_side(adapter, ranks=other)
    adapter.invalid.add(15)
    for described in (request(), loading(SLOTS)):
        side.bind(StepMetadata([described]))
        described.load_spec = None  # this rank's weights have changed
        side.wait_for_save()
        side.clear()
    assert other.heard == [{15}]
