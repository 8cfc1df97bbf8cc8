"""What is shown while a command works, and what is kept from its answer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

NOISY = """
import os, sys
from lmcache_xpu.cli.progress import working
from lmcache_xpu.errors import SettingsError
with working("Importing"):
    print("noise of Python"); os.write(1, b"noise of C"); os.write(2, b"noise of C")
    {end}
print("answer")
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", NOISY.replace("{end}", end)]
    return subprocess.run(program, capture_output=True, text=True)


def test_a_pipe_gets_the_answer_alone():
    done = run("pass")
    assert (done.stdout, done.stderr, done.returncode) == ("answer\n", "", 0)


def test_an_error_of_the_user_keeps_the_noise_away():
    assert "noise" not in run("raise SettingsError('a', 'b')").stderr


def test_a_bug_shows_what_was_printed_before_it():
    done = run("raise ZeroDivisionError")
    assert "noise of Python" in done.stderr
    assert "noise of C" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_the_step_and_no_noise(no_color):
    ours, theirs = pty.openpty()
    program = [sys.executable, "-c", NOISY.replace("{end}", "import time; time.sleep(0.5)")]
    env = os.environ | {"TERM": "xterm"} | ({"NO_COLOR": no_color} if no_color else {})
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.stdout == "answer\n"
    assert "Importing ..." in shown
    assert "noise" not in shown
