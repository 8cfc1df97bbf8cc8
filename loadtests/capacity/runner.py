"""Runs a step: the load test as a process, watched, and ended when it is plain that it fails."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from loadtests.capacity.chat import Chat
from loadtests.capacity.step import Limits, Step, measure
from loadtests.client import DROPPED, OK
from loadtests.doubts import doubt_of_counters
from loadtests.figures import load
from loadtests.recorder import ENDS, META, REQUESTS

__all__ = ["EARLY", "BrokenStepError", "judge", "run_step"]

EARLY = "stopped-early"  # a file beside the rows of a step that was ended before its time
LOOK_S = 0.5
STOP_S = 60.0
CLEARLY = 0.1  # of the planned requests are over the limit; half of that would fail already
ROOT = Path(__file__).parents[2]


class BrokenStepError(Exception):
    """A step measured nothing that counts: the server went away, or the load test refused."""


def judge(directory: Path, limits: Limits) -> Step:
    """Judge a step by the rows that it left behind.

    Raises:
        BrokenStepError: its figures are not those of this step alone.
    """
    run = load(directory)
    if doubt := doubt_of_counters(run):
        raise BrokenStepError(f"the step in {directory}: NOT KNOWN whether it fits: {doubt}")
    return measure(run, limits, stopped_early=(directory / EARLY).exists())


def run_step(
    chat: Chat,
    users: int,
    *,
    url: str,
    salt: str,
    limits: Limits,
    directory: Path,
    arguments: list[str],
) -> Step:
    """Put so many users on a server, and judge.

    Raises:
        BrokenStepError: nothing was measured, or the server went away.
    """
    directory.mkdir(parents=True)
    options = {"--host": url, "--report-dir": directory, "--salt": salt, **chat.options(users)}
    words = [str(word) for pair in options.items() for word in pair]
    start = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    command = [*start, "--only-summary", "--canned", *words, *arguments]
    planned = chat.offered_qps(users) * (chat.duration_s(users) - chat.gap_s)
    with (directory / "locust.log").open("w") as log:
        log.write(shlex.join(command) + "\n")
        log.flush()
        locust = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            code = _watch(locust, directory, chat, limits, planned)
        except BaseException:  # Ctrl-C too: Locust ends with us
            _end(locust)
            raise
    meta = directory / META
    ended_by = json.loads(meta.read_text())["ended_by"] if meta.exists() else ""
    if code not in (0, 1) or not (ended_by in ENDS or (directory / EARLY).exists()):
        raise BrokenStepError(
            f"the step with {users} users ended with exit code {code} "
            f"({ended_by or 'nothing measured'}); {directory / 'locust.log'} has the cause"
        )
    return judge(directory, limits)


def _watch(
    locust: subprocess.Popen[bytes], directory: Path, chat: Chat, limits: Limits, planned: float
) -> int:
    while True:
        try:
            return locust.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if _over(directory / REQUESTS, chat.gap_s, limits.ttft_s) > CLEARLY * planned:
                (directory / EARLY).touch()
                return _end(locust)


def _end(locust: subprocess.Popen[bytes]) -> int:
    """End it as Ctrl-C does; a process that a shell put into the background ignores that."""
    if locust.poll() is None:
        locust.send_signal(signal.SIGTERM)
    try:
        return locust.wait(STOP_S)
    except subprocess.TimeoutExpired:
        locust.kill()
        return locust.wait()


def _over(path: Path, steady_from_s: float, limit_s: float) -> int:
    """Return how many requests got their first token too late, or failed, so far."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return sum(
        row["outcome"] != OK or row["started_s"] + row["ttft_s"] - row["intended_s"] > limit_s
        for row in rows
        if row["outcome"] != DROPPED and row["started_s"] >= steady_from_s
    )
