"""Real engines that come and go in one process, which ends by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

ROUNDS, WARM_UP = 10, 2  # the first of each mode


@pytest.mark.skipif(
    "ENGINE_ROUNDS" not in os.environ,
    reason="engines in turn in one process were seen to hang; ENGINE_ROUNDS=1 runs this",
)
@pytest.mark.timeout(600)
def test_eight_engines_leave_the_process_as_it_was(tmp_path: Path):
    """Of ten, standard and layerwise in turn; an eleventh is left to the end of the process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LMCACHE", "VLLM_"))}
    model = make_model(EXACT, tmp_path / "models")
    probe = Path(__file__).with_name("rounds_probe.py")
    done = subprocess.run(
        [sys.executable, str(probe), str(model), str(tmp_path / "kv"), str(ROUNDS)],
        env=env,
        capture_output=True,
        text=True,
        timeout=580,
    )
    if done.returncode:
        pytest.fail(f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(json.dumps(result))
    found, states = result["found"], result["states"]
    assert {one["mode"] for one in found[::2]} == {"StandardConnector"}
    assert {one["mode"] for one in found[1::2]} == {"LayerwiseConnector"}
    assert len({tuple(one["answer"]) for one in found}) == 1
    assert [one["hits"] > 0 for one in found] == [False] * WARM_UP + [True] * (ROUNDS - 1)
    before = states[WARM_UP - 1]
    for after in states[WARM_UP:]:
        for what in ("threads", "files", "sockets"):
            assert after[what] <= before[what] + 2, (what, before, after)  # no more with each
        assert after["mib"] < before["mib"] + 128, (before, after)
