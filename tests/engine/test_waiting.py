"""Requests that wait for their loads, in a real vLLM on CPU: tokens and blocks are compared."""

from __future__ import annotations

import pytest
from support.real_engine import BLOCK, CHUNK
from support.scripts import printed, run_probe
from support.waiting_probe import HELD_STEPS, HOUR_S, PAUSES

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

# The newer runner is slow in Triton's interpreter: `make test PART=models`, and CI with the oldest.
RUNNERS = ("default", pytest.param("newer", marks=pytest.mark.matrix))


@pytest.fixture(scope="module", params=RUNNERS)
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict:
    model = make_model(EXACT, tmp_path_factory.mktemp("model"))
    return printed(run_probe("waiting", model, request.param))


def test_a_slow_load_holds_nobody_else_up(report: dict):
    assert report["holding"]["waits"]
    assert report["holding"]["others computed"] >= HELD_STEPS - 2
    assert report["holding"]["right"]


def test_a_reset_meanwhile_says_that_it_could_not_be(report: dict):
    assert report["holding"]["reset"] is False
    assert report["holding"]["reset afterwards"] is True


def test_who_is_aborted_while_it_waits_leaves_nothing_behind(report: dict):
    aborted = report["aborted"]
    assert aborted["blocks kept"] > 4  # until the load has ended
    assert aborted["free again"]
    assert not aborted["answered"]
    assert aborted["right"]


def test_what_several_share_is_loaded_once(report: dict):
    assert report["shared"] == {"loads": 1, "right": True}


def test_without_a_choice_made_a_request_waits_only_beside_others(report: dict):
    assert report["chosen"] == {"alone": 0, "beside": 1, "right": True}


def test_what_is_computed_sooner_than_loaded_is_computed(report: dict):
    computed = report["computed"]
    assert (computed["loads"], computed["right"]) == (0, True)
    assert computed["more"] == {"computed": 1, "stored": 0}  # the tier had it all
    assert computed["hit"]["hit"] == 4 * CHUNK
    assert computed["hit"]["restored"] >= 4 * CHUNK // BLOCK


def test_hours_without_requests_do_not_count_as_computing(report: dict):
    """Else hits are computed that take a tenth of the time to load: seen on a card."""
    assert report["paused"]["small steps"] >= PAUSES
    assert report["paused"]["longest"] < HOUR_S


@pytest.mark.parametrize("fault", ["a chunk lost", "all lost"])
def test_what_is_lost_is_computed(report: dict, fault: str):
    failing = report["failing"][fault]
    assert max(failing.pop("lost")) > 0
    assert failing == {"right": True, "reason": "length", "afterwards": True}


@pytest.mark.parametrize("fault", ["a chunk lost", "all lost"])
def test_or_its_request_fails_where_that_was_asked_for(report: dict, fault: str):
    failing = report["failing, policy fail"][fault]
    assert (failing["reason"], failing["afterwards"]) == ("error", True)


def test_no_lock_outlives_its_request(report: dict):
    assert report["locks"] == {"read": 0, "write": 0}
