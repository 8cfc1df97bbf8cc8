"""The scheduler's half: what vLLM is answered when it asks for a hit."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from support.scheduling import CHUNK, HIT, blocks, maker, request, step
from vllm.v1.request import RequestStatus

from lmcache_xpu.connector.connector import LMCacheXPUServerConnector


@pytest.fixture
def make(monkeypatch):
    return maker(monkeypatch)


@pytest.mark.parametrize(
    ("engine", "allowed"),
    [
        ({}, True),
        ({"groups": 2}, True),
        ({"ranks": 2}, False),
        ({"zeroes": True}, False),
        ({"groups": 2, "recurrent": True}, False),
        ({"groups": 2, "states": 1, "zeroes": True}, True),
        ({"groups": 3, "states": 1, "zeroes": True, "window": 128}, False),
        ({"groups": 2, "states": 1, "ranks": 2}, False),
        ({"groups": 2, "window": 128}, False),
    ],
    ids=[
        *("alone", "groups", "ranks", "zeroes", "states from a server", "states"),
        *("states and windows alone", "states and ranks", "windows alone"),
    ],
)
def test_loads_are_inside_steps_where_they_can_and_the_scheduler_says_so(make, engine, allowed):
    half = make(**engine)
    assert half.policy.loads == "async"
    half.load_in_steps()
    assert half.policy.loads == ("auto" if allowed else "async")


def test_states_are_waited_for_where_vllm_would_lack_a_block(make):
    """Of a request of 1,000 tokens: 63 blocks of attention, and 3 of its states."""
    for free, waits in ((66, False), (65, True)):
        half = make(groups=2, states=1, loads="step", free=free)
        half.load_in_steps()
        assert half.matched_tokens(request(shared_prefix_boundary=0), 0) == (768, waits)


def test_what_a_step_loads_is_not_zeroed(make):
    half = make(groups=2, states=1, loads="step")
    half.load_in_steps()
    asked = request(shared_prefix_boundary=0)
    half.matched_tokens(asked, 0)
    half.allocated(asked, blocks(63, groups=2), 768)
    output = step(("a", 768, 232))
    output.new_block_ids_to_zero = [1, 2, 48, 49, 63, 70]
    half.describe(output)
    assert output.new_block_ids_to_zero == [49, 63, 70]


@pytest.mark.parametrize(
    ("loads", "answer"), [("step", (768, False)), ("async", (768, True)), ("auto", (768, False))]
)
def test_what_is_chosen_is_answered(make, loads, answer):
    half = make(loads=loads)
    assert half.matched_tokens(request(), 0) == (768, True)  # nobody begins it anew
    half.load_in_steps()
    assert half.matched_tokens(request(), 0) == answer


@pytest.mark.parametrize(
    ("kept", "answer"), [(0, (768, True)), (300, (468, True)), (768, (0, False)), (900, (0, False))]
)
def test_what_vllm_has_itself_is_not_loaded(make, kept, answer):
    assert make().matched_tokens(request(), kept) == answer


def test_of_a_whole_prompt_the_last_token_is_computed(make):
    assert make().matched_tokens(request(HIT), 0) == (HIT - 1, True)


def test_while_the_server_looks_vllm_asks_again(make):
    half = make()
    half._lookups.hit = None
    assert half.matched_tokens(request(), 0) == (None, True)
    half._lookups.hit = HIT
    assert half.matched_tokens(request(), 0) == (HIT, True)
    assert half._keys.begun == 1


def test_a_request_is_looked_up_when_it_arrives(make):
    half = make()
    half.arrived(request())
    assert half._lookups.calls == [("begin", "a", 768)]
    assert half.matched_tokens(request(), 0) == (768, True)
    assert half._keys.begun == 1


@pytest.mark.parametrize("why", ["whole prompt", "session", "epochs"])
def test_some_are_looked_up_when_they_are_scheduled(make, why):
    half = make()
    half._keys.is_mixed = why == "epochs"
    whole = why == "whole prompt"
    half.arrived(request(skip_reading_prefix_cache=whole, resumable=why == "session"))
    assert half._lookups.calls == []
    assert not half._requests


def test_the_server_hears_whether_anybody_waits_beside_a_request(make):
    for engines, alone in ((1, True), (2, False)):
        half = make(engines=engines)
        half.matched_tokens(request(), 0)
        assert half._lookups.asked == [("a", 768, alone)]
    half = make()
    half.policy._running = {"other"}
    half.matched_tokens(request(), 0)
    assert half._lookups.asked == [("a", 768, False)]


@pytest.mark.parametrize("why", ["failed", "whole prompt", "broken"])
def test_some_requests_are_not_looked_up(make, why):
    half = make()
    if why == "failed":
        half.give_up_hits("a")
    if why == "broken":
        half.promises.fail(["a"])
    asked = request(skip_reading_prefix_cache=why == "whole prompt")
    assert half.matched_tokens(asked, 0) == (0, False)
    assert half._lookups.asked == []


def waiting(half, **fields):
    """A request that waits for its load."""
    waits = request(request_id="waits", block_hashes=list("abcdefgh" * 8), **fields)
    assert half.matched_tokens(waits, 0) == (HIT, True)
    half.allocated(waits, blocks(63), HIT)
    return waits


def test_a_request_that_begins_alike_is_asked_for_again_until_the_load_has_ended(make):
    half = make(loads="async")
    first, second = waiting(half), request(request_id="b", block_hashes=list("abcdefgh" * 8))
    assert half.matched_tokens(second, 0) == (None, True)
    half.describe(step())
    assert half.matched_tokens(second, 0) == (None, True)
    half.allocated(first, blocks(63), 0)  # vLLM goes on with it
    assert half.matched_tokens(second, HIT) == (0, False)


@pytest.mark.parametrize(
    ("loads", "kept", "released"),
    [("async", 0, (0, HIT)), ("async", CHUNK + 16, (CHUNK, HIT)), ("step", 0, (0, HIT))],
)
def test_what_no_worker_was_told_of_is_unlocked(make, loads, kept, released):
    half, asks = make(loads=loads, worker=True), request()
    half.load_in_steps()
    half.matched_tokens(asks, kept)
    half.allocated(asks, blocks(63), HIT - kept)
    half._lookups.calls.clear()
    half.describe_failed(step(("a", HIT, 232)))
    calls = [call for call in half._lookups.calls if call[0] == "release"]
    assert calls == [("release", *released)]
    half.describe_failed(step())
    assert len([call for call in half._lookups.calls if call[0] == "release"]) == len(calls)


@pytest.mark.parametrize("why", ["it failed", "it ended", "it has what is loaded"])
def test_it_waits_no_longer_than_that(make, why):
    half = make(loads="async")
    first, second = waiting(half), request(request_id="b", block_hashes=list("abcdefgh" * 8))
    half.describe(step())
    if why == "it failed":
        assert half.matched_tokens(first, 0) == (0, False)
    elif why == "it ended":
        half.finished(first)
    kept = 0 if why != "it has what is loaded" else HIT
    assert half.matched_tokens(second, kept) == (HIT - kept, kept < HIT)


@pytest.mark.parametrize(("options", "other"), [({"keeps_prefixes": False}, "a"), ({}, "x")])
def test_others_load_their_own(make, options, other):
    """Where vLLM has no prefix cache, and of another prompt."""
    half = make(loads="async", **options)
    waiting(half)
    second = request(request_id="b", block_hashes=list(f"{other}bcdefgh" * 8))
    assert half.matched_tokens(second, 0) == (HIT, True)


def test_a_request_whose_load_brought_nothing_is_computed(make):
    """vLLM asks again, though the request has its blocks: else it would wait for ever."""
    half = make()
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(63), 768)
    assert [load.end for load in half.describe(step()).waiting] == [768]
    assert half.matched_tokens(request(), 0) == (0, False)
    half.allocated(request(), blocks(63), 0)
    assert half.describe(step(("a", 0, 512))).stores[0].end == 512
    assert len(half._lookups.asked) == 1


def test_a_preempted_request_begins_anew(make):
    half = make()
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(63), 768)
    half.describe(step(("a", 768, 232)))
    again = request(status=RequestStatus.PREEMPTED)
    assert half.matched_tokens(again, 0) == (768, True)
    assert half.matched_tokens(again, 0) == (768, True)
    assert half._keys.begun == 2


def test_a_look_up_that_fails_is_made_again_without_the_server():
    connector = LMCacheXPUServerConnector.__new__(LMCacheXPUServerConnector)
    connector.scheduler_half = Mock()
    connector.scheduler_half.matched_tokens.side_effect = [KeyError("planted"), (0, False)]
    assert connector.get_num_new_matched_tokens(request(), 0) == (0, False)
    connector.scheduler_half.give_up_hits.assert_called_once_with("a")


def test_steps_end_where_states_can_be_hit_again(make):
    """At first where earlier prompts parted, then below the prompt's end."""
    half = make(recurrent=True)
    half._lookups.hit, half._lookups.shared = 0, lambda tokens: 256
    asked = request(shared_prefix_boundary=0)
    half.matched_tokens(asked, 0)
    assert asked.shared_prefix_boundary == 256
    half._ends.go_on(asked, 256)
    assert asked.shared_prefix_boundary == 512
