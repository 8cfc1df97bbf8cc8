"""Loads that begin while their step is being decided on."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="LMCache's adapter for vLLM imports it")
from support.caches import bits
from support.loads import LAYERS, Case, expected, settle
from support.tuned import tuned

from lmcache_xpu.gpu_connector import registered_cache
from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.kv_connector.early_loads import EarlyLoads, _Prefix
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.staging_ring import SMALLEST_STAGING_BYTES

LOADED = frozenset({4, 1, 3})  # blocks of a case


@pytest.fixture(autouse=True)
def layer_bytes():
    """Layer groups of 2, 2, 1 and 1 layers, one of them at once."""
    size = sum(obj.get_size() for obj in Case().objs) // LAYERS
    with tuned(direct_launch_bytes=2 * size, ahead_bytes=1):
        yield size


def begun(case: Case, shared: InFlight | None = None) -> None:
    if shared is not None:
        case.overlap = case.connector.overlap = shared
    case.overlap.schedule(LOADED, tokens=1024)
    case.load()


def layers_there(case: Case) -> int:
    return sum(case.there(layer) for layer in range(LAYERS))


def compute(case: Case, *others: Case) -> None:
    for layer in range(LAYERS):
        case.overlap.before_layer(layer)
        assert all(case_of_step.there(layer) for case_of_step in (case, *others))
        case.overlap.after_layer(layer)
    assert case.overlap.end_step() == []
    settle()
    case.overlap.drain()
    for case_of_step in (case, *others):
        assert case_of_step.held == {1}
        assert torch.equal(bits(case_of_step.target.raw), bits(expected(case_of_step)))


def test_a_load_goes_on_while_the_next_one_and_the_step_are_decided_on():
    first, second = Case(), Case()
    begun(first)
    assert layers_there(first) == 2
    begun(second, first.overlap)
    assert (layers_there(first), layers_there(second)) == (4, 2)
    first.overlap.begin_step(LOADED, 2048)
    assert layers_there(first) + layers_there(second) == 8
    compute(first, second)


@pytest.mark.parametrize(("ahead", "there"), [(1, 2), (3, 4), (100, LAYERS)])
def test_so_much_is_enqueued_at_once(ahead: int, there: int, layer_bytes: int):
    case = Case()
    with tuned(ahead_bytes=ahead * layer_bytes):
        begun(case)
    assert layers_there(case) == there
    case.overlap.begin_step(LOADED, 1024)
    compute(case)


def test_what_needs_copies_waits_for_the_step(monkeypatch):
    """The engine's own few bytes would come behind them."""
    monkeypatch.setattr(registered_cache, "Stager", functools.partial(Stager, in_place=False))
    first, second = (Case(staging_bytes=SMALLEST_STAGING_BYTES) for _ in range(2))
    for case in (first, second):  # kernels that reach host memory would need no copies
        case.connector._registration.register(case.target.engine).stager._direct = None
        begun(case, first.overlap)
    assert (layers_there(first), layers_there(second)) == (0, 0)
    first.overlap.begin_step(LOADED, 2048)
    assert (layers_there(first), layers_there(second)) == (4, 4)
    compute(first, second)


def test_blocks_that_a_store_still_reads_are_protected():
    events: list[str] = []
    gathered = SimpleNamespace(reached=lambda: False, wait=lambda: events.append("protected"))
    case = Case()
    case.overlap.add_store([], SimpleNamespace(moved=None, gathered=gathered), case.slots)
    add = case.overlap.add_load
    case.overlap.add_load = lambda *args: (events.append("loaded"), add(*args))
    begun(case)
    assert events == ["protected", "loaded"]
    case.overlap.schedule(frozenset({0, 2}), tokens=1)
    assert events == ["protected", "loaded"]
    case.overlap.begin_step(frozenset({0, 2}), 1)
    assert case.overlap.end_step() != []


def test_the_engines_copies_go_before_those_that_follow_its_first_layer(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(Stager, "let_engine_copy", lambda self: events.append("engine's"))
    load = Stager.load
    monkeypatch.setattr(
        Stager, "load", lambda self, *a, **k: (events.append("group"), load(self, *a, **k))[1]
    )
    first, second = Case(), Case()
    begun(first)
    begun(second, first.overlap)
    first.overlap.begin_step(LOADED, 2048)
    events.clear()
    compute(first, second)
    assert events[0] == "engine's"
    assert events.count("engine's") == 1  # once in a step
    assert events.count("group") > 0


def test_a_load_that_fails_at_once_is_reported_with_its_step(monkeypatch):
    case = Case()
    monkeypatch.setattr(Stager, "load", lambda *args, **kwargs: 1 / 0)
    begun(case)
    case.overlap.begin_step(LOADED, 1024)
    case.overlap.before_layer(0)
    (missed,) = case.overlap.end_step()
    assert torch.equal(missed, case.slots)


# The scheduler's half


class Worker:
    """A worker's connector in this process."""

    def __init__(self) -> None:
        self.loads: list[Any] = []

    def begin_load(self, metadata: Any) -> None:
        self.loads.append(metadata)


def request(**changes: Any) -> SimpleNamespace:
    facts = {"request_id": "r", "all_token_ids": list(range(18)), "num_tokens": 18}
    rest = {"mm_features": [], "prompt_embeds": None, "sampling_params": None}
    return SimpleNamespace(**facts | rest | changes)


def scheduled(worker: Worker | None, *, can_load: bool = True) -> tuple[EarlyLoads, Any]:
    spec = SimpleNamespace(can_load=can_load, lmcache_cached_tokens=16, vllm_cached_tokens=4)
    adapter = SimpleNamespace(load_specs={"r": spec})
    loads = EarlyLoads(adapter, 4, lambda: worker, lambda name, tokens: [f"{name}'s", *tokens[1:]])
    return loads, spec


def test_a_worker_loads_what_lmcache_promised():
    loads, spec = scheduled(worker := Worker())
    loads.begin(request(), [7, 9, 2, 3, 8])
    (described,) = worker.loads
    (load,) = described.requests
    assert (load.req_id, load.token_ids) == ("r", ["r's", *range(1, 18)])
    slots = [block * 4 + token for block in (7, 9, 2, 3, 8) for token in range(4)][:18]
    assert load.slot_mapping.tolist() == slots
    assert load.load_spec is spec
    assert described.new_blocks == {9, 2, 3, 8}  # not the one that vLLM had
    assert described.tokens == 2


@pytest.mark.parametrize(
    ("worker", "can_load", "changes"),
    [
        (None, True, {}),  # in another process
        (Worker(), False, {}),
        (Worker(), True, {"request_id": "not looked up"}),
        (Worker(), True, {"mm_features": ["an image"]}),
        (Worker(), True, {"prompt_embeds": torch.zeros(20, 2)}),
    ],
)
def test_all_else_is_left_to_the_step(worker, can_load: bool, changes: dict[str, Any]):
    loads, _ = scheduled(worker, can_load=can_load)
    loads.begin(request(**changes), [7, 9, 2, 3, 8])
    assert worker is None or worker.loads == []


def test_a_prefix_is_a_list_without_a_copy():
    tokens = list(range(10, 30))
    prefix, wanted = _Prefix(tokens, 8), tokens[:8]
    assert list(prefix) == wanted
    assert len(prefix) == 8
    assert (prefix[0], prefix[-1]) == (10, 17)
    with pytest.raises(IndexError):
        prefix[8]
    for cut in (slice(5), slice(50), slice(-2), slice(None)):  # what LMCache counts
        assert isinstance(prefix[cut], _Prefix)
        assert list(prefix[cut]) == wanted[cut]
    for cut in (slice(0, 4), slice(4, 8), slice(6, 50), slice(None, None, 3), slice(1, None)):
        assert prefix[cut] == wanted[cut]  # what it hashes
