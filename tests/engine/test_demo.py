"""The demo as `make demo` runs it: its table, and its answers from the tiers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.tools,
    pytest.mark.timeout(600),
]  # two engines, one after the other


def test_every_answer_comes_from_a_tier(tmp_path):
    program = Path(sys.executable).with_name("lmcache-xpu")
    done = subprocess.run(
        [program, "demo"],
        cwd=tmp_path,
        env=environment(COLUMNS="80"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "10 of 10 answers from the CPU and disk tiers" in done.stdout
    assert "disk tier after a restart" in done.stdout
