from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_xpu.connector.hit_ways import HitWays
from lmcache_xpu.connector.load_policy import LoadPolicy
from lmcache_xpu.transfer.tuning import tuning_of

UNKNOWN = None


def request(name: str = "a", tokens: int = 100_000) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def step(**tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values())
    )


def load(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name)


def ways(loads: str = "auto") -> HitWays:
    ways = HitWays()
    ways.allow_steps(LoadPolicy(loads, tuning_of("cpu")))
    return ways


def begun(ways: HitWays, step: SimpleNamespace, loads: list) -> tuple[list, int]:
    """Begin a step: the loads inside it, and how many hits are computed."""
    _, inside, computed = ways.begin_step(step, loads)
    return inside, computed


def test_where_loads_may_not_be_inside_steps_all_requests_wait():
    ways = HitWays()
    assert not ways.allows_steps
    assert ways.choose(request(), 0, 99_000) == "async"
    assert begun(ways, step(), [load("a")]) == ([], 0)


def test_alone_a_request_is_loaded_inside_its_step():
    alone = ways()
    assert alone.allows_steps
    assert alone.choose(request(), 0, 99_000) == "step"
    mine = load("a")
    assert begun(alone, step(a=1000), [mine]) == ([mine], 0)


def test_beside_others_a_long_load_waits_and_a_short_one_does_not():
    beside = ways()
    beside.begin_step(step(other=1), [])
    assert beside.choose(request(), 0, 99_000) == "async"
    assert beside.choose(request(), 99_000, 100) == "step"
    beside.finished("other")
    assert beside.choose(request(), 0, 99_000) == "step"


def test_a_request_is_alone_where_no_other_is_computed_or_waits_for_its_load():
    asked = ways()
    assert asked.is_alone("a")
    asked.begin_step(step(a=1, other=1), [])
    assert not asked.is_alone("a")
    asked.finished("other")
    assert asked.is_alone("a")
    asked.begin_step(step(), [load("loading")])
    assert not asked.is_alone("a")


def test_behind_a_load_beside_steps_a_long_one_waits_too_until_that_has_ended():
    behind = ways()
    behind.begin_step(step(other=1), [])
    assert behind.choose(request("first"), 0, 99_000) == "async"
    behind.begin_step(step(), [load("first")])
    assert behind.choose(request(), 0, 99_000) == "async"
    behind.end_step(None, {"first"}, UNKNOWN)
    assert behind.choose(request(), 0, 99_000) == "step"


@pytest.mark.parametrize("forced", ["step", "async"])
def test_a_setting_leaves_no_choice(forced):
    assert ways(forced).choose(request(), 0, 99_000) == forced
    beside = ways(forced)
    beside.begin_step(step(other=1), [])
    assert beside.choose(request(), 0, 99_000) == forced


def test_what_is_computed_sooner_than_loaded_is_computed_and_counted_with_its_step(monkeypatch):
    computing = ways()
    monkeypatch.setattr(LoadPolicy, "computes", lambda *_: True)
    assert computing.choose(request(), 0, 99_000) == "computed"
    assert computing.is_computed("a")
    assert begun(computing, step(other=1), []) == ([], 0)  # it is not in this one
    assert begun(computing, step(a=1000), []) == ([], 1)
    assert not computing.is_computed("a")


def test_the_last_choice_counts_and_a_request_that_ended_is_forgotten():
    last = ways()
    assert last.choose(request(), 0, 99_000) == "step"
    last.begin_step(step(other=1), [])
    assert last.choose(request(), 0, 99_000) == "async"
    assert begun(last, step(other=1), [load("a")]) == ([], 0)
    assert begun(ways(), step(), [load("a")]) == ([], 0)
    ended = ways()
    ended.choose(request(), 0, 99_000)
    ended.finished("a")
    assert begun(ended, step(), [load("a")]) == ([], 0)


def test_workers_report_by_its_number_that_a_step_has_ended(monkeypatch):
    ended: list[int | None] = []
    monkeypatch.setattr(LoadPolicy, "end_step", lambda _, number: ended.append(number))
    measuring = ways()
    first, second = (measuring.begin_step(step(a=1), []).number for _ in range(2))
    assert first != second
    measuring.end_step(second, (), UNKNOWN)
    assert ended == [second]
    assert HitWays().begin_step(step(a=1), []).number is None  # nobody asks
