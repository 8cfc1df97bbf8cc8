"""What becomes of hits: loads inside steps, loads that requests wait for, or computing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_xpu.connector.load_policy import (
    COMPUTED_IN_TURN,
    SMALL_STEPS,
    LoadPolicy,
)
from lmcache_xpu.transfer.tuning import Tuning

TUNING = Tuning(loaded_per_computed=32, load_us=2000)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def chosen(loads: str, tuning: Tuning = TUNING, clock: Clock | None = None) -> LoadPolicy:
    policy = LoadPolicy(tuning, clock or Clock())
    policy.loads = loads
    return policy


@pytest.fixture
def policy(clock: Clock) -> LoadPolicy:
    return chosen("auto", clock=clock)


def of(**tokens: int) -> SimpleNamespace:
    """vLLM's step of these requests."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values())
    )


def begun(policy: LoadPolicy, tokens: int, *, loads: bool = False) -> int | None:
    """A step's number."""
    return policy.begin_step(of(a=tokens), ["loads"] * loads, ())[0]


def step(policy: LoadPolicy, clock: Clock, tokens: int, seconds: float, *, loads: bool = False):
    number = begun(policy, tokens, loads=loads)
    clock.now += seconds
    policy.end_step(number, (), None)


def loaded(policy: LoadPolicy, per_s: float | None) -> None:
    policy.end_step(None, (), per_s)


def measured(policy: LoadPolicy, clock: Clock) -> None:
    """10,000 tokens a second are computed, 100,000 loaded, and a small step takes 5 ms."""
    step(policy, clock, 1000, 0.1)
    step(policy, clock, 16, 0.0)  # behind a large one
    for _ in range(3):
        step(policy, clock, 16, 0.005)
    loaded(policy, 100_000)


@pytest.mark.parametrize("loads", ["step", "async"])
def test_a_setting_leaves_no_choice(loads, clock):
    policy = chosen(loads, clock=clock)
    measured(policy, clock)
    assert not policy.computes(1, 10_000)
    for kept, tokens in ((0, 99_000), (99_000, 1)):
        assert policy.choose(request(), kept, tokens) == loads


def test_before_anything_is_measured_a_ratio_stands_for_speeds(policy: LoadPolicy):
    assert not policy.waits(3200, 100)
    assert policy.waits(3201, 100)


@pytest.mark.parametrize(("loaded", "waits"), [(1400, False), (1600, True)])
def test_a_load_that_its_step_would_hide_is_inside_it(policy, clock, loaded: int, waits: bool):
    measured(policy, clock)
    assert policy.waits(loaded, 100) == waits  # 5 ms + 10 ms


def test_a_part_of_a_prompt_that_vllm_does_not_wait_for_counts_in_the_step_behind_it(policy, clock):
    for _ in range(3):
        step(policy, clock, 1000, 0.001)
        step(policy, clock, 1000, 0.001)
        step(policy, clock, 500, 0.248)  # all of it
        step(policy, clock, 16, 0.005)
    loaded(policy, 100_000)
    # 2,500 tokens take a quarter of a second; newer steps count more.
    assert not policy.waits(7_000, 1000)
    assert policy.waits(20_000, 1000)


def test_steps_with_loads_inside_and_without_tokens_say_nothing(policy, clock):
    measured(policy, clock)
    step(policy, clock, 1000, 5.0, loads=True)
    step(policy, clock, 16, 5.0, loads=True)
    step(policy, clock, 16, 0.005)
    step(policy, clock, 0, 5.0)
    assert policy.waits(1600, 100)


def test_a_few_slow_steps_are_not_what_a_step_takes(policy, clock):
    measured(policy, clock)
    for _ in range(SMALL_STEPS):
        step(policy, clock, 16, 0.005)
    for _ in range(3):
        step(policy, clock, 16, 0.5)
    assert policy.waits(1600, 100)


def test_steps_of_some_hundred_tokens_are_no_small_ones(policy, clock):
    """What they take would count as what any step takes, and hits would be computed for it."""
    measured(policy, clock)
    for _ in range(SMALL_STEPS):
        step(policy, clock, 300, 0.03)
    assert not policy.computes(256, 32)


def test_a_step_begins_when_the_one_before_has_ended(policy, clock):
    """With asynchronous scheduling vLLM decides on a step while another one runs."""
    measured(policy, clock)
    running = begun(policy, 16)
    for _ in range(SMALL_STEPS):
        following = begun(policy, 16)
        clock.now += 0.005
        policy.end_step(running, (), None)
        running = following
    assert policy.waits(1600, 100)


def test_what_was_never_begun_is_not_ended(policy: LoadPolicy):
    policy.end_step(None, (), None)
    policy.end_step(7, (), None)
    assert policy.waits(3201, 100)


def test_a_step_of_whose_end_vllm_says_nothing_disturbs_no_other(policy, clock):
    """Behind the last answer comes a step without tokens. Hours later there are requests again."""
    for _ in range(SMALL_STEPS):
        measured(policy, clock)
        begun(policy, 0)
        clock.now += 3600
    assert policy.waits(1600, 100)
    assert not policy.waits(1400, 100)
    assert not policy.computes(10_000, 1)


def test_a_step_without_tokens_does_not_wait_for_the_part_of_a_prompt_before_it(policy, clock):
    measured(policy, clock)
    step(policy, clock, 1000, 0.001)
    step(policy, clock, 0, 0.001)
    step(policy, clock, 16, 0.1)  # that part
    assert max(policy._small_steps_s) < 0.01


# What is computed, though it could be loaded


def test_nothing_is_computed_before_computing_was_measured(policy: LoadPolicy, clock):
    loaded(policy, 1.0)
    assert not policy.computes(256, 1)
    step(policy, clock, 16, 0.005)
    assert not policy.computes(256, 1)


@pytest.mark.parametrize(
    ("hit", "computes"),
    [
        ((40, 1), True),  # with one token or with 41 a step takes 5 ms
        ((70, 1), True),  # 7.1 ms, and a load takes 2.7
        ((90, 1), False),  # 9.1 ms; a load 2.9
        ((20, 500), True),  # 2 ms more than 50; a load 2.2
        ((30, 500), False),  # 3 ms; a load 2.3
        ((10_000, 1), False),
    ],
)
def test_few_tokens_are_computed_beside_others(policy, clock, hit: tuple[int, int], computes: bool):
    measured(policy, clock)
    assert policy.computes(*hit) == computes


@pytest.mark.parametrize(("loaded_per_s", "computes"), [(9_000, True), (12_000, False)])
def test_what_a_slow_link_would_load_is_computed(policy, clock, loaded_per_s, computes: bool):
    measured(policy, clock)
    for _ in range(40):
        loaded(policy, loaded_per_s)
    assert policy.computes(4096, 1) == computes  # computed in 0.41 s


def test_now_and_then_a_hit_is_loaded_to_see_whether_it_still_is(policy, clock):
    measured(policy, clock)
    for _ in range(40):
        loaded(policy, 1000)
    hit = 4096, 1
    for _ in range(2):
        assert [policy.computes(*hit) for _ in range(COMPUTED_IN_TURN)] == [True] * COMPUTED_IN_TURN
        assert not policy.computes(*hit)
    for _ in range(8):
        loaded(policy, 50_000)
    assert not policy.computes(*hit)


@pytest.mark.parametrize("loads", ["always", "step", "async"])
def test_settings_that_compute_no_hit(loads, clock):
    policy = chosen(loads, clock=clock)
    measured(policy, clock)
    loaded(policy, 1.0)
    assert not policy.computes(4096, 1)


def test_a_mean_of_speeds_counts_what_was_measured(policy, clock):
    measured(policy, clock)
    loaded(policy, None)
    loaded(policy, 200_000)
    assert policy._loaded_per_s == 125_000


# Of an engine's requests


def request(name: str = "a", tokens: int = 100_000) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def made(loads: str = "auto") -> LoadPolicy:
    return chosen(loads, Tuning())


def test_where_loads_may_not_be_inside_steps_all_requests_wait():
    policy = LoadPolicy(TUNING)
    assert policy.choose(request(), 0, 99_000) == "async"
    assert policy.begin_step(of(a=1), (), ["a"]) == (None, 0)  # nobody asks when it ends


def test_alone_a_request_is_loaded_inside_its_step():
    policy = made()
    assert policy.choose(request(), 0, 99_000) == "step"


def test_beside_others_a_long_load_waits_and_a_short_one_does_not():
    policy = made()
    policy.begin_step(of(other=1), (), ())
    assert policy.choose(request(), 0, 99_000) == "async"
    assert policy.choose(request(), 99_000, 100) == "step"  # the last choice counts
    policy.finished("other")
    assert policy.choose(request(), 0, 99_000) == "step"


def test_a_request_is_alone_where_no_other_is_computed_or_waits_for_its_load():
    policy = made()
    assert policy.is_alone("a")
    policy.begin_step(of(a=1, other=1), (), ())
    assert not policy.is_alone("a")
    policy.finished("other")
    assert policy.is_alone("a")
    policy.begin_step(of(), (), ["loading"])
    assert not policy.is_alone("a")


def test_behind_a_load_beside_steps_a_long_one_waits_too_until_that_has_ended():
    policy = made()
    policy.begin_step(of(other=1), (), ())
    assert policy.choose(request("first"), 0, 99_000) == "async"
    policy.begin_step(of(), (), ["first"])
    assert policy.choose(request(), 0, 99_000) == "async"
    policy.end_step(None, {"first"}, None)
    assert policy.choose(request(), 0, 99_000) == "step"


@pytest.mark.parametrize("forced", ["step", "async"])
def test_a_forced_mode_is_chosen_alone_and_beside_others(forced):
    assert made(forced).choose(request(), 0, 99_000) == forced
    policy = made(forced)
    policy.begin_step(of(other=1), (), ())
    assert policy.choose(request(), 0, 99_000) == forced


def test_what_is_computed_sooner_than_loaded_is_computed_and_counted_with_its_step(monkeypatch):
    policy = made()
    monkeypatch.setattr(LoadPolicy, "computes", lambda *_: True)
    assert policy.choose(request(), 0, 99_000) == "computed"
    assert policy.begin_step(of(other=1), (), ())[1] == 0  # it is not in this one
    assert policy.begin_step(of(a=1000), (), ())[1] == 1
    assert policy.begin_step(of(a=1), (), ())[1] == 0


def test_workers_report_by_its_number_that_a_step_has_ended(monkeypatch):
    ended: list[int | None] = []
    monkeypatch.setattr(LoadPolicy, "_measure", lambda _, step: ended.append(step.number))
    policy = made()
    first, second = (policy.begin_step(of(a=1), (), ())[0] for _ in range(2))
    assert first != second
    policy.end_step(second, (), None)
    assert ended == [second]


# What is read from a disk or a shared tier


@pytest.mark.parametrize(("read_per_s", "reads"), [(9_000, False), (12_000, True)])
def test_a_disk_that_is_slower_than_computing_is_not_read(policy, clock, read_per_s, reads: bool):
    assert policy.reads(4096)
    measured(policy, clock)
    assert policy.reads(4096)  # how fast it is was never measured
    policy.was_read(4096, 4096 / read_per_s)
    assert policy.reads(4096) == reads  # computed in 0.41 s


def test_now_and_then_a_slow_disk_is_read_to_see_whether_it_still_is(policy, clock):
    measured(policy, clock)
    policy.was_read(1000, 1.0)
    assert [policy.reads(4096) for _ in range(COMPUTED_IN_TURN)] == [False] * COMPUTED_IN_TURN
    assert policy.reads(4096)
    for _ in range(8):
        policy.was_read(50_000, 1.0)
    assert policy.reads(4096)


@pytest.mark.parametrize("loads", ["always", "step", "async"])
def test_settings_that_read_a_slow_disk(loads, clock):
    policy = chosen(loads, clock=clock)
    measured(policy, clock)
    policy.was_read(1, 1.0)
    assert policy.reads(4096)
