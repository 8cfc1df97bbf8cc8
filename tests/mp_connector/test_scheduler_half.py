"""What the scheduler's half answers vLLM; LMCache's own part is in engine/test_server.py."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

pytest.importorskip("vllm")

from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.load_policy import LoadPolicy
from lmcache_xpu.mp_connector import near_loads, scheduler_half
from lmcache_xpu.mp_connector.lmcache_connector import ServerConnector
from lmcache_xpu.mp_connector.scheduler_half import SchedulerHalf
from lmcache_xpu.versions.lmcache_server import (
    LMCacheMPConnector,
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
)

CHUNK = 256
BLOCKS = SimpleNamespace(get_block_ids=lambda: (list(range(1, 64)),))


def half(
    monkeypatch,
    *,
    ranks: int = 1,
    engines: int = 1,
    zeroes: bool = False,
    groups: int = 1,
    loads="auto",
):
    monkeypatch.setattr(scheduler_half, "Keys", lambda *_: SimpleNamespace(outdated=list))
    monkeypatch.setattr(near_loads, "near_connector", lambda _: None)
    made = SchedulerHalf.__new__(SchedulerHalf)
    made.scheduler_adapter = SimpleNamespace(lmcache_tokens_per_chunk=CHUNK, begin_look_up=Mock())
    made.request_trackers, made._group_tokens_per_block = {}, [16]
    made.start_scheduler(
        SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size=engines)
        ),
        SimpleNamespace(kv_cache_groups=[None] * groups, needs_kv_cache_zeroing=zeroes),
        {"xpu.loads": loads},
        [None] * groups,
    )
    return made


@pytest.mark.parametrize(
    ("engine", "allowed"),
    [({}, True), ({"ranks": 2}, False), ({"zeroes": True}, False), ({"groups": 2}, False)],
    ids=["alone", "ranks", "zeroes", "groups"],
)
def test_loads_are_inside_steps_where_they_can_and_the_scheduler_says_so(
    monkeypatch, engine, allowed
):
    made = half(monkeypatch, **engine)
    assert not made._ways.allows_steps
    made.load_in_steps()
    assert made._ways.allows_steps is allowed


def request(tokens: int = 1000, features=()):
    return SimpleNamespace(
        request_id="a",
        num_tokens=tokens,
        skip_reading_prefix_cache=False,
        mm_features=list(features),
    )


@pytest.fixture(autouse=True)
def collecting():
    """Tests end with garbage collection on, as it was."""
    yield
    gc.enable()


@pytest.fixture
def looked_up(monkeypatch):
    """Requests that LMCache looks up: the server has 768 tokens."""
    names = []

    def matched(connector, asked, kept):
        names.append(asked.request_id)
        return 768 - kept, True

    monkeypatch.setattr(LMCacheMPConnector, "get_num_new_matched_tokens", matched)
    monkeypatch.setattr(LMCacheMPConnector, "update_state_after_alloc", lambda *_: None)
    monkeypatch.setattr(SchedulerHalf, "_get_or_create_request_tracker", lambda *_: None)
    return names


@pytest.mark.parametrize(
    ("loads", "answer"), [("step", (768, False)), ("async", (768, True)), ("auto", (768, False))]
)
def test_what_is_chosen_is_answered(monkeypatch, looked_up, loads, answer):
    made = half(monkeypatch, loads=loads)
    assert made.get_num_new_matched_tokens(request(), 0) == (768, True)  # nobody begins it anew
    made.load_in_steps()
    assert made.get_num_new_matched_tokens(request(), 0) == answer


def test_the_adapter_hears_whether_anybody_waits_beside_a_request(monkeypatch, looked_up):
    made, beside = half(monkeypatch), half(monkeypatch, engines=2)
    for asked, alone in (made, True), (beside, False):
        asked.get_num_new_matched_tokens(request(), 0)
        asked.scheduler_adapter.begin_look_up.assert_called_once_with(
            is_alone=alone, meanwhile=None
        )
    monkeypatch.setattr(made._ways, "_running", {"other"})
    made.get_num_new_matched_tokens(request(), 0)
    assert made.scheduler_adapter.begin_look_up.call_args == call(is_alone=False, meanwhile=None)


def test_a_request_whose_load_failed_is_looked_up_no_more(monkeypatch, looked_up):
    made = half(monkeypatch)
    made.give_up_hits("a")
    assert made.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert looked_up == []


def test_of_a_hit_that_is_computed_lmcache_counts_nothing_as_loaded(monkeypatch, looked_up):
    made = half(monkeypatch)
    made.load_in_steps()
    monkeypatch.setattr(LoadPolicy, "computes", lambda *_: True)
    made.request_trackers["a"] = tracker = SimpleNamespace(num_lmcache_hit_tokens=768)
    assert made.get_num_new_matched_tokens(request(), 0) == (0, False)
    made.update_state_after_alloc(request(), None, 0)
    assert tracker.num_lmcache_hit_tokens == 0


@pytest.fixture
def near(monkeypatch, looked_up):
    """Makes a scheduler's half beside a worker in its process, and a request that is there.

    Returns them with what the worker was asked so far: names of requests, and ranges of tokens.
    """

    def make(*, loads: str = "step", free: int = 1000, chunked: bool = True, worker: bool = True):
        made, asked = half(monkeypatch, loads=loads), []
        beside = ServerConnector.__new__(ServerConnector)
        beside.collection = GarbageCollection()
        beside.name_early = lambda name, describe: asked.append((name, describe()))
        beside.ask_early = lambda name, start, end: asked.append((name, start, end))
        beside.begin_early = asked.append
        made._vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked)
        )
        made._pool = SimpleNamespace(num_gpu_blocks=1000, get_num_free_blocks=lambda: free)
        monkeypatch.setattr(near_loads, "near_connector", lambda _: worker and beside)
        monkeypatch.setattr(
            LMCacheMPRequestMetadata,
            "GetRetrieveMetadata",
            lambda tracker, *sizes: (
                tracker.num_vllm_hit_tokens,
                tracker.num_lmcache_hit_tokens,
                tracker.state,
                *sizes,
            ),
        )
        made.load_in_steps()
        made.request_trackers["a"] = SimpleNamespace(
            all_token_ids=range(1000),
            num_vllm_hit_tokens=300,
            num_lmcache_hit_tokens=768,
            state="as it was",
        )
        return made, asked

    return make


# Of all chunks of the prompt, whatever part of them the engine has; and what is a hit.
NAMED = ("a", (0, 768, LMCacheMPRequestState.WAITING_FOR_LOAD, CHUNK, [16]))
ASKED = ("a", 256, 768)


def test_a_worker_in_this_process_asks_as_soon_as_the_hit_is_there(near):
    made, asked = near()
    made.get_num_new_matched_tokens(request(), 300)
    assert asked == [NAMED, ASKED]
    assert made.request_trackers["a"].state == "as it was"


def test_chunks_are_named_while_the_server_looks(near):
    made, asked = near()
    made.scheduler_adapter.begin_look_up = lambda is_alone, meanwhile: meanwhile()
    made.get_num_new_matched_tokens(request(), 300)
    assert asked == [NAMED, NAMED, ASKED]  # the worker does it once


@pytest.mark.parametrize(
    ("engine", "features"),
    [({"free": 112}, []), ({"chunked": False}, []), ({}, ["an image"])],
    ids=["blocks", "whole prompts", "encoder"],
)
def test_where_vllm_may_not_take_it_the_worker_asks_when_the_request_has_its_blocks(
    near, engine, features
):
    """63 blocks are for the request, and 50 are kept free: together one more than there are."""
    made, asked = near(**engine)
    made.get_num_new_matched_tokens(request(features=features), 300)
    assert asked == []
    made.update_state_after_alloc(request(), BLOCKS, 468)
    assert asked == [NAMED, ASKED]


def test_with_as_many_blocks_as_it_may_need_it_asks_at_once(near):
    made, asked = near(free=113)
    made.get_num_new_matched_tokens(request(), 300)
    assert asked == [NAMED, ASKED]


@pytest.mark.parametrize(
    "other", [{"loads": "async"}, {"worker": False}], ids=["waits", "elsewhere"]
)
def test_nobody_asks_before_the_step_for_a_load_beside_it_or_by_another_process(near, other):
    made, asked = near(**other)
    made.get_num_new_matched_tokens(request(), 300)
    made.update_state_after_alloc(request(), BLOCKS, 468)
    assert asked == []


def test_a_worker_in_this_process_begins_a_step_that_loads(near):
    made, asked = near()
    loading, computing = (SimpleNamespace(loads=loads) for loads in (["a load"], []))
    made._near.begin(computing)
    assert asked == []
    made._near.begin(loading)
    assert asked == [loading]
    elsewhere, asked = near(worker=False)
    elsewhere._near.begin(loading)
    assert asked == []


@pytest.mark.parametrize("worker", [True, False], ids=["here", "elsewhere"])
def test_garbage_is_collected_when_the_step_is_enqueued(near, monkeypatch, worker):
    """By who enqueues it in this process; else when the step is decided on."""
    gc.enable()
    made, _ = near(worker=worker)
    made.get_num_new_matched_tokens(request(), 300)
    assert not gc.isenabled()
    made.scheduler_adapter.end_step = Mock()
    described = SimpleNamespace(requests=[])
    monkeypatch.setattr(LMCacheMPConnector, "build_connector_meta", lambda *_: described)
    monkeypatch.setattr(scheduler_half, "written_blocks", lambda *_: ())
    made.build_connector_meta(
        SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1})
    )
    assert gc.isenabled() is not worker
    if worker:
        made._near.worker.clear_connector_metadata()
    assert gc.isenabled()


def test_it_is_collected_again_when_the_connector_ends(near, monkeypatch):
    gc.enable()
    made, _ = near()
    made.get_num_new_matched_tokens(request(), 300)
    worker = made._near.worker
    monkeypatch.setattr(LMCacheMPConnector, "shutdown", lambda _: None)
    ServerConnector.shutdown(worker)
    assert gc.isenabled()
