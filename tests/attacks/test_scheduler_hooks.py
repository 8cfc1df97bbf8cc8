"""A hook of vLLM's scheduler that fails for a request: it is computed, and the engine goes on."""

from __future__ import annotations

import pytest
from support.failing_hooks_probe import HOOKS, LENGTH, LOADS, WHEN
from support.real_engine import CHUNK
from support.scripts import printed, run_probe

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["in-process", "server"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("hooks")
    model = make_model(EXACT, directory)
    return printed(run_probe("failing_hooks", request.param, model, directory))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("loads", LOADS)
def test_a_hook_that_fails_costs_a_hit_and_no_token(
    report: dict, loads: str, hook: str, when: str
) -> None:
    asked = report[f"{loads} {hook} {when}"]
    assert asked["planted"] == [hook]
    assert asked["right"]
    assert asked["right again"]
    assert asked["hit again"] == LENGTH // CHUNK * CHUNK


def test_no_lock_outlives_a_hook_that_failed(report: dict) -> None:
    assert report["locks"] == 0
