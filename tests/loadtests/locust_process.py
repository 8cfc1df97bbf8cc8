"""Locust with the load test's file, in a process that is ended in any case."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "--users": 4,
    "--num-rounds": 4,
    "--qps": 4,
    "--answer-len": 8,
    "--shared-system-prompt": 20,
    "--user-history-prompt": 30,
    "--duration-s": 4,
}


@contextmanager
def locust(url, directory, *more, headless=True, **options):
    """A Locust that runs; ended in any case."""
    all_options = OPTIONS | {"--host": url, "--report-dir": directory} | options
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--only-summary"]
    command += [str(word) for pair in all_options.items() for word in pair]
    command += [*more, *(["--headless"] if headless else [])]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=interruptible,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def interruptible():
    """A shell lets what it starts in the background ignore Ctrl-C, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process, within_s=40):
    """Its exit code and what it said."""
    said, _ = process.communicate(timeout=within_s)
    return process.returncode, said
