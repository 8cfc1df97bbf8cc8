"""End to end on CPU with a cache in the engine's process: hits are exact, and a fault costs a hit.

Bytes and tokens are compared, with the engine's own cache zeroed before each hit.
"""

from __future__ import annotations

import pytest
from support.call_counts import check_walk
from support.real_engine import BLOCK, CHUNK, LENGTHS, cached, is_exact
from support.scripts import environment, printed, run_probe

pytestmark = pytest.mark.engine

HIT = "inside"
# Loads inside the steps of their requests, or while these wait; and inside, with the model runner
# that vLLM uses on Intel GPUs by default, in Triton's interpreter.
WAYS = ("inside", "beside", pytest.param("newer", marks=pytest.mark.matrix))


@pytest.fixture(scope="module", params=WAYS)
def seen(request, model, directory) -> dict:
    disk = directory / f"disk {request.param}"
    report = printed(run_probe("server", request.param, model, directory, disk))
    return {"way": request.param, **report}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_and_gives_the_recomputed_tokens(seen, name):
    assert seen["first"][name] == 0
    assert seen["hits"][name]["hit"] == cached(name)
    assert is_exact(seen["hits"][name], name)
    assert seen["errors before"] == {}


def test_a_hit_and_a_store_run_few_functions(seen):
    check_walk(seen["walk"])


def test_a_salt_has_keys_of_its_own(seen):
    assert seen["salts"] == [0, cached(HIT), 0]


def test_what_a_client_puts_in_a_request_ends_nothing(seen):
    assert len(seen["strange"]) >= 7
    assert all(seen["strange"])


def test_every_load_runs_the_way_that_is_asked_for(seen):
    way, other = ("async", "step") if seen["way"] == "beside" else ("step", "async")
    assert seen["ways"][way] >= len(LENGTHS)
    assert seen["ways"][other] == 0
    assert (seen["begun early"] > 0) is (seen["way"] != "beside")


def test_a_load_that_fails_inside_its_step_begins_anew_and_nothing_of_it_is_stored(seen):
    """What is wrong is seen when the engine has computed from it, and perhaps a step more."""
    if seen["way"] == "beside":
        assert "spoiled" not in seen
        return
    first, again = seen["spoiled"]
    assert first["same"]
    assert first["hit"] == 2 * CHUNK
    assert seen["errors"]["store unfilled"] >= 1
    assert again["same"]
    assert again["hit"] == 4 * CHUNK
    assert again["restored"] >= 4 * CHUNK // BLOCK


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_load_or_a_store_that_fails_is_one_recomputation(seen, direction):
    if seen["way"] != "beside":
        assert "failed" not in seen
        return
    first, again = seen["failed"][direction]
    assert is_exact(first)
    assert is_exact(again)
    assert seen["errors"][f"{direction} OSError"] == 1


def test_a_hit_that_is_computed_stores_what_was_computed(seen):
    if seen["way"] == "beside":
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


def test_requests_that_are_aborted_while_they_are_loaded_leave_nothing(seen):
    assert seen["aborted"]["freed"]
    assert is_exact(seen["after aborts"], "block")


def test_nothing_is_found_that_was_stored_before_a_reset(seen):
    assert seen["reset"]["hit"] == 0
    assert is_exact(seen["reset"], "block")
    assert seen["after the reset"]["hit"] == cached("block")


def test_what_is_on_disk_outlives_its_engine(model, directory):
    """The second has a hash seed of its own, and a scheduler of others: its requests wait."""
    place = (model, directory, directory / "disk of two")
    steps = {
        "store": printed(run_probe("server", "store", *place)),
        "find": printed(run_probe("server", "find", *place, env=environment())),
    }
    assert set(steps["store"].values()) == {0}
    for name in LENGTHS:
        assert steps["find"][name]["hit"] == cached(name)
        assert is_exact(steps["find"][name], name)
    assert steps["find"]["ways"] == {"step": 0, "async": len(LENGTHS), "computed": 0}
