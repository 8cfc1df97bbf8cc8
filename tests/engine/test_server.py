"""End to end on CPU with a real LMCache server: hits are exact, and a server costs hits alone.

As in test_engine.py bytes and tokens are compared, with the engine's cache zeroed before each hit.
"""

from __future__ import annotations

import pytest
from support.call_counts import check_walk
from support.real_engine import BLOCK, CHUNK, LENGTHS, cached, is_exact
from support.scripts import printed, run_probe

pytestmark = pytest.mark.engine

AT_MOST_S = 2.0  # that a server may hold a request; what is computed beside it is less
HIT = "inside"
# Requests have their loads inside their steps, or wait for them; or inside, with what vLLM uses on
# Intel GPUs by default, in Triton's interpreter. `make test PART=models` has all of these.
WAYS = ("inside", *(pytest.param(way, marks=pytest.mark.matrix) for way in ("beside", "newer")))


@pytest.fixture(scope="module", params=WAYS)
def seen(request, model, directory) -> dict:
    report = printed(run_probe("server", request.param, model, directory))
    return {"way": request.param, **report}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_and_gives_the_recomputed_tokens(seen, name):
    assert seen["first"][name] == 0
    assert seen["hits"][name]["hit"] == cached(name)
    assert is_exact(seen["hits"][name], name)
    assert seen["errors before"] == {}


def test_the_server_has_this_package_s_module_and_still_has_when_it_was_started_again(seen):
    assert (seen["asks"], seen["asks at last"]) == ("ServerPlaces", "ServerPlaces")


def test_a_full_server_counts_what_it_refuses_and_costs_hits_alone(seen):
    full = seen["full"]
    assert full["held"] > 0
    assert full["refused"] >= 1  # on the server's own /metrics
    assert all(asked["same"] and asked["restored"] >= 6 for asked in full["asked"])
    assert full["asked"][0]["hit"] == 0
    assert full["asked"][-1]["hit"] == 3 * CHUNK  # the memory is there again
    assert all(
        asked["seconds"] < AT_MOST_S + full["asked"][0]["seconds"] for asked in full["asked"]
    )


def test_a_hit_and_a_store_run_few_functions(seen):
    check_walk(seen["walk"])


def test_a_salt_has_keys_of_its_own(seen):
    assert seen["salts"] == [0, cached(HIT), 0]


def test_what_a_client_puts_in_a_request_ends_nothing(seen):
    assert len(seen["strange"]) >= 7
    assert all(seen["strange"])


@pytest.mark.parametrize("fault", ["hung", "killed"])
def test_a_server_that_does_not_answer_costs_hits_and_one_wait(seen, fault):
    first, second = seen[fault]
    assert is_exact(first)
    assert is_exact(second)
    assert (first["hit"], second["hit"]) == (0, 0)
    assert first["seconds"] < AT_MOST_S + second["seconds"]


def test_a_server_of_another_version_lets_one_request_wait_at_most(seen):
    """It does where it answers the heartbeat's question to the server that was killed."""
    for asked in seen["another version"]:
        assert is_exact(asked)
        assert asked["hit"] == 0
        assert asked["seconds"] < AT_MOST_S + seen["hung"][1]["seconds"]
    tokens = seen["asked of another version"]
    assert 0 in tokens  # what heartbeats ask
    assert sum(map(bool, tokens)) <= 1 < len(seen["another version"])
    assert seen["errors"]["load server"] >= 1


@pytest.mark.parametrize(
    "again", ["goes on", "started again", "after a load", "after a store"], ids=lambda name: name
)
def test_hits_come_back_when_the_server_does(seen, again):
    assert seen[again]["seen"]
    assert is_exact(seen[again]["first"], "block")
    assert is_exact(seen[again]["second"], "block")
    assert seen[again]["second"]["hit"] == cached("block")


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_server_that_is_killed_in_the_middle_costs_no_byte(seen, direction):
    asked = seen[f"killed in a {direction}"]
    assert is_exact(asked)
    assert asked["seconds"] < AT_MOST_S + seen["hung"][1]["seconds"]
    assert seen["hit before it"]["hit"] == cached(HIT)


def test_memory_that_holds_something_else_is_computed(seen):
    assert seen["damaged"]["hit"] == cached("block")  # the server promised it
    assert is_exact(seen["damaged"], "block")
    assert seen["errors"]["load damaged"] >= 1
    assert seen["errors"]["store server"] >= 1


def test_what_is_damaged_is_stored_anew_under_another_key(seen):
    first, second = seen["after damage"]
    assert is_exact(first, "block")
    assert is_exact(second, "block")
    assert second["hit"] == cached("block")


def test_requests_that_are_aborted_while_they_are_loaded_leave_nothing(seen):
    assert (seen["aborted"]["loading"] > 0) == (seen["way"] == "beside")
    assert seen["aborted"]["freed"]
    assert is_exact(seen["after aborts"], "block")


def test_every_load_runs_the_way_that_is_asked_for(seen):
    way, other = ("async", "step") if seen["way"] == "beside" else ("step", "async")
    assert seen["ways"][way] >= len(LENGTHS)
    assert seen["ways"][other] == 0


def test_loads_begin_when_vllm_has_decided_on_their_steps(seen):
    """Those that the server has answered by then; scheduler and worker share a process."""
    assert (seen["begun early"] > 0) is (seen["way"] != "beside")


def test_a_load_that_fails_inside_its_step_begins_anew_and_nothing_of_it_is_stored(seen):
    """What is wrong is seen when the engine has computed from it, and perhaps a step more."""
    if seen["way"] == "beside":
        assert "spoiled" not in seen
        return
    failed, again = seen["spoiled"]
    assert failed["same"]
    assert failed["hit"] == 2 * CHUNK  # the server promised it
    assert seen["errors"]["load late"] == 1
    assert seen["errors"]["store unfilled"] >= 1
    assert again["same"]
    assert again["hit"] == 4 * CHUNK
    assert again["restored"] >= 4 * CHUNK // BLOCK


def test_a_hit_that_is_computed_stores_what_was_computed(seen):
    if seen["way"] == "beside":
        assert "computed" not in seen
        return
    first, again = seen["computed"]["asked"]
    assert seen["computed"]["ways"] == 1
    assert (first["same"], first["hit"]) == (True, 0)
    assert (again["same"], again["hit"]) == (True, 4 * CHUNK)
    assert again["restored"] >= 4 * CHUNK // BLOCK


def test_several_hits_are_loaded_at_once(seen):
    if seen["way"] != "beside":
        assert seen["at once"]["same"]
        assert seen["at once"]["hit"] == sum(map(cached, LENGTHS))


def test_the_engine_schedules_ahead_as_it_would_without_our_scheduler(seen):
    ahead = seen["way"] == "newer"  # vLLM's CPU engine does not
    assert seen["scheduler"] == {"class runs ahead": ahead, "engine runs ahead": ahead}


def test_nothing_is_found_that_was_stored_before_a_reset(seen):
    assert seen["reset"]["hit"] == 0
    assert is_exact(seen["reset"], "block")
    assert seen["after the reset"]["hit"] == cached("block")
