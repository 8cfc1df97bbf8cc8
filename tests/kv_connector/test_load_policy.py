"""Which requests wait for their loads."""

from __future__ import annotations

import pytest

from lmcache_xpu.kv_connector.load_policy import SMALL_STEPS, LoadPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> LoadPolicy:
    return LoadPolicy("auto", 32, clock)


def step(policy: LoadPolicy, clock: Clock, tokens: int, seconds: float, *, loads: bool = False):
    policy.begin_step(tokens, loads=loads)
    clock.now += seconds
    policy.end_step()


@pytest.mark.parametrize(("way", "waits"), [("step", False), ("async", True)])
def test_a_setting_leaves_no_choice(way, waits: bool):
    policy = LoadPolicy(way, 32)
    assert policy.waits(10_000, 1, others=False) == waits
    assert policy.waits(1, 10_000, others=True) == waits


def test_where_nobody_else_waits_for_a_token_a_load_is_inside_its_step(policy: LoadPolicy):
    assert not policy.waits(10**6, 1, others=False)


def test_before_anything_is_measured_a_ratio_stands_for_speeds(policy: LoadPolicy):
    assert not policy.waits(3200, 100, others=True)
    assert policy.waits(3201, 100, others=True)


def measured(policy: LoadPolicy, clock: Clock) -> None:
    """10,000 tokens a second are computed, 100,000 loaded, and a small step takes 5 ms."""
    step(policy, clock, 1000, 0.1)
    step(policy, clock, 16, 0.0)  # behind a large one
    for _ in range(3):
        step(policy, clock, 16, 0.005)
    policy.hear(100_000)


@pytest.mark.parametrize(("loaded", "waits"), [(1400, False), (1600, True)])
def test_a_load_that_its_step_would_hide_is_inside_it(policy, clock, loaded: int, waits: bool):
    measured(policy, clock)
    assert policy.waits(loaded, 100, others=True) == waits  # 5 ms + 10 ms


def test_a_part_of_a_prompt_that_vllm_does_not_wait_for_counts_in_the_step_behind_it(policy, clock):
    for _ in range(3):
        step(policy, clock, 1000, 0.001)
        step(policy, clock, 1000, 0.001)
        step(policy, clock, 500, 0.248)  # all of it
        step(policy, clock, 16, 0.005)
    policy.hear(100_000)
    # 2,500 tokens take a quarter of a second; newer steps count more.
    assert not policy.waits(7_000, 1000, others=True)
    assert policy.waits(20_000, 1000, others=True)


def test_steps_with_loads_inside_and_without_tokens_say_nothing(policy, clock):
    measured(policy, clock)
    step(policy, clock, 1000, 5.0, loads=True)
    step(policy, clock, 16, 5.0, loads=True)
    step(policy, clock, 16, 0.005)
    step(policy, clock, 0, 5.0)
    assert policy.waits(1600, 100, others=True)


def test_a_few_slow_steps_are_not_what_a_step_takes(policy, clock):
    measured(policy, clock)
    for _ in range(SMALL_STEPS):
        step(policy, clock, 16, 0.005)
    for _ in range(3):
        step(policy, clock, 16, 0.5)
    assert policy.waits(1600, 100, others=True)


def test_a_step_begins_when_the_one_before_has_ended(policy, clock):
    """With asynchronous scheduling vLLM decides on a step while another one runs."""
    measured(policy, clock)
    policy.begin_step(16, loads=False)
    for _ in range(SMALL_STEPS):
        policy.begin_step(16, loads=False)
        clock.now += 0.005
        policy.end_step()
    assert policy.waits(1600, 100, others=True)


def test_what_was_never_begun_is_not_ended(policy: LoadPolicy):
    policy.end_step()
    assert policy.waits(3201, 100, others=True)
