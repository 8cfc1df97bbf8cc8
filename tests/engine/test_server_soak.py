"""What the soak of LMCache's server calls broken; and short ones, with and without a fault."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.scripts import environment
from support.soak_report import AT_MOST_S, Tally, verdict

SOUND = {"answers": True, "left": []}


def tally(**values) -> Tally:
    return Tally(**{"seconds": [0.2, AT_MOST_S + 0.9], "computed_s": [0.5, 1.0], **values})


def test_a_sound_run_breaks_nothing():
    assert verdict({**SOUND, "tally": tally()}) == []


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"tally": tally(different=["700: ..."])}, "different"),
        ({"tally": tally(seconds=[AT_MOST_S + 1.1])}, "at most 3.20 s"),
        ({"tally": tally(), "answers": False}, "lost"),
        ({"tally": tally(), "left": ["kill"]}, "no time for 1 faults"),
    ],
    ids=["answers", "waits", "lost", "unfinished"],
)
def test_each_promise_can_be_broken(report, words):
    [broken] = verdict({**SOUND, **report})
    assert words in broken


@pytest.mark.engine
@pytest.mark.tools
@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(False, id="sound"),
        pytest.param(True, id="wrong bytes", marks=pytest.mark.matrix),
    ],
)
def test_a_short_soak_sees_wrong_bytes(planted):
    """Without a fault all is kept; with chunks that are loaded wrong it says so."""
    faults = "0" if planted else "1"
    arguments = ["--hits", "12" if planted else "60", "--kills", faults, "--hangs", faults]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "support.server_soak",
            *arguments,
            *(["--wrong"] if planted else []),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    shown = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == planted, shown
    assert ("different: " in done.stdout) == planted, shown
    assert "| hits |" in done.stdout
