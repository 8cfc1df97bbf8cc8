"""How long the fuzzer runs: short and always the same cases, or as long as it is told to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from unittest import mock

import copied_requests
import torch
from disk import Disk
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from steps import Steps
from tier import Tier

# By target: cases of the short form, and steps of one case.
SHORT = {
    "copies": (250, 0),
    "steps": (80, 10),
    "disk": (80, 25),
    "tier": (10, 10),
}
MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "steps": Steps,
    "disk": Disk,
    "tier": Tier,
}
PATIENCE = 10  # times the cases of the short form in which a planted fault has to be seen
ROUND = 100  # cases of the long form between two looks at the clock


def options(target: str, examples: int, **more: object) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=SHORT[target][1] or 1,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        **more,
    )


def run(target: str, chosen: settings) -> int:
    """Run cases; raises at the first that fails, made small. Returns how many there were."""
    cases = 0

    def counted(run: Callable[..., None]) -> Callable[..., None]:
        def count_case(*args: object) -> None:
            nonlocal cases
            cases += 1
            run(*args)

        return count_case

    logging.disable(logging.CRITICAL)  # loads that fail on purpose
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if target == "copies":
            count_case = counted(copied_requests.run)
            chosen(given(copied_requests.cases())(lambda case: count_case(case)))()
        else:
            machine = MACHINES[target]
            with mock.patch.object(machine, "teardown", counted(machine.teardown)):
                run_state_machine_as_test(machine, settings=chosen)
    finally:
        torch.set_num_threads(threads)
        logging.disable(logging.NOTSET)
    return cases


def short(target: str) -> int:
    """What CI runs."""
    return run(target, options(target, SHORT[target][0], derandomize=True))


def seen(target: str) -> None:
    """Cases that are the same each time, until one fails, which is not made small."""
    cases = PATIENCE * SHORT[target][0]
    run(target, options(target, cases, derandomize=True, phases=[Phase.generate]))


def long(target: str, examples: int, seconds: float) -> int:
    """Other cases each time, until there were so many or the time is up; 0 for no bound."""
    cases, end = 0, time.monotonic() + seconds
    while (not examples or cases < examples) and (not seconds or time.monotonic() < end):
        left = examples - cases if examples else ROUND
        size = min(left, ROUND // 10 if target == "tier" else ROUND)
        cases += run(target, options(target, size))
    return cases
