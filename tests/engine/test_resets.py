"""Weights that change under a real engine on CPU, and resets: nothing old is found or served.

Every answer is compared with the one that the engine gives when nothing can be found, under the
weights that it has by then.
"""

from __future__ import annotations

import pytest
from support.scripts import environment, printed, run_probe

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

WHOLE = 1024  # tokens of whole chunks in the prompt that is asked again and again


def probe(step: str, *args: str) -> dict:
    # With another hash seed; and with threads that are chosen before PyTorch is imported.
    env = environment() if step in ("restart", "ranks") else None
    return printed(run_probe("reset", step, *args, env=env))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(EXACT, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def place(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    directory = tmp_path_factory.mktemp("resets")
    return model, str(directory / "disk"), str(directory / "reference.json")


@pytest.fixture(scope="module")
def report(place: tuple[str, ...]) -> dict:
    return probe("reset", *place)


@pytest.fixture(scope="module")
def restarted(place: tuple[str, ...], report: dict) -> dict:
    return probe("restart", *place)


def is_new(turns: dict) -> None:
    """Nothing was found, then what was stored in the meantime; both answers are right."""
    assert turns["first"]["hit"] == 0
    assert turns["again"]["hit"] == WHOLE
    assert turns["first"]["right"]
    assert turns["again"]["right"]


CHANGES = ["reset", "reset caches", "reloaded", "sleep 1", "sleep 2", "pause"]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_found_that_was_stored_before(report: dict, change: str):
    """After a reset, vLLM's ways to pause and sleep, and its own way to load other weights.

    On CPU vLLM's sleep keeps the weights where they are; what it does before is the same.
    """
    is_new(report["plain"])
    is_new(report[change])


def test_other_weights_give_other_answers(report: dict):
    """Else the comparisons above would show nothing."""
    answers = [report[name]["again"]["answer"] for name in ("plain", "reset", "reset caches")]
    assert len({tuple(answer) for answer in answers}) == 3
    assert report["first"]  # and those of the files are back when they are read again


def test_a_reset_gives_back_the_room_of_its_own_tiers(report: dict):
    assert report["said"] is True
    assert all(entries > 0 for entries in report["before"][0])
    assert report["after"] == [[0, 0]]


def test_what_was_stored_under_changed_weights_is_not_served_after_a_restart(
    report: dict, restarted: dict
):
    """Stored before anybody could know, after a reset, and when the engine ended."""
    assert report["poison"]["right"]
    assert all(entries > 0 for entries in report["end"][0])
    assert restarted["left"] == [[0, 0]]
    for name in ("stored", "poison", "running"):
        assert restarted[name]["hit"] == 0
        assert restarted[name]["first"]
    assert restarted["again"]["again"]["hit"] == WHOLE


def test_what_vllms_own_cache_has_of_other_weights_is_not_stored(report: dict):
    """Its prefix cache is not ours to empty: until someone does, it serves what it has."""
    assert not report["stale"]["before"]["right"]
    assert report["stale"]["after"]["hit"] == 0
    assert report["stale"]["after"]["right"]


@pytest.mark.parametrize(("case", "hit"), [("running", WHOLE), ("kept running", 0)])
def test_a_request_that_runs_through_a_reset_leaves_nothing_of_before(
    report: dict, case: str, hit: int
):
    """One that vLLM preempts begins anew, so that its KV is all new; the other is of both."""
    assert report[case]["reset"] is (case == "running")  # vLLM's own part of it
    assert report[case]["stored"] == [[0, 0]]
    assert report[case]["first"]["hit"] == hit
    assert report[case]["again"]["hit"] == WHOLE
    assert report[case]["first"]["right"]
    assert report[case]["again"]["right"]


def test_what_was_promised_to_requests_that_wait_is_not_loaded(report: dict):
    crowd = report["crowd"]
    assert crowd["hit_before"] > 0
    assert crowd["hit_after"] == 0
    assert crowd["pins"] == [0]
    assert crowd["right"] == [True] * max(1, len(crowd["right"]))


@pytest.mark.matrix
def test_two_ranks_find_nothing_after_a_reset_or_under_other_weights(model: str, tmp_path):
    """In processes of their own: they hear of a reset, and say what they know, with a step."""
    ranks = probe("ranks", model, str(tmp_path / "disk"), "unused")
    is_new(ranks["plain"])
    assert ranks["said"] is True
    is_new(ranks["reset"])
    assert ranks["reloaded"]["hit"] == 0
    assert ranks["reloaded"]["right"]
    is_new(ranks["later"])
