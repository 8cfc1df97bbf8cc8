"""Real engines that come and go in one process, which ends by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import printed, run_probe

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

ROUNDS, WARM_UP = 4, 1


@pytest.mark.timeout(600)
def test_engines_that_come_and_go_leave_the_process_as_it_was(tmp_path: Path):
    """Four of them; a fifth is left to the end of the process."""
    model = make_model(EXACT, tmp_path / "models")
    result = printed(run_probe("rounds", model, tmp_path / "kv", ROUNDS, timeout=580))
    print(json.dumps(result))
    engines, states = result["found"], result["states"]
    assert {engine["mode"] for engine in engines} == {"LMCacheXPUServerConnector"}
    assert len({tuple(engine["answer"]) for engine in engines}) == 1
    assert [engine["hits"] > 0 for engine in engines] == [False] * WARM_UP + [True] * ROUNDS
    before = states[WARM_UP]
    for after in states[WARM_UP:]:
        for what in ("threads", "files", "sockets"):
            assert after[what] <= before[what] + 1, (what, before, after)  # no more with each
        assert after["mib"] < before["mib"] + 128, (before, after)
