"""Ctrl-C on a terminal, while an engine starts and when it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from support.until import until

from lmcache_xpu.launch import foreground
from lmcache_xpu.launch import serve as module
from lmcache_xpu.launch.settings import Settings

STARTING = "lmcache-xpu: starting vLLM ...\n"
STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
SERVES = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("0", flush=True)
time.sleep(60)
"""


@contextmanager
def running(program):
    """The program as an engine, in a process group of its own; and what it printed first."""
    argv = [sys.executable, "-m", foreground.__name__, sys.executable, "-c", program]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as `serve` does
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ctrl_c_ends_an_engine_that_starts_in_one_line():
    with running(STARTS) as (process, child):
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=10)
        assert (process.returncode, said) == (130, f"{STARTING}lmcache-xpu: interrupted\n")
        until(lambda: not psutil.pid_exists(child))


def test_ctrl_c_is_the_engines_own_once_it_serves():
    with running(SERVES) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=10)
        assert (process.returncode, said) == (7, STARTING)


@pytest.mark.parametrize(
    ("program", "code"),
    [("print(0); raise SystemExit(3)", 3), ("print(0, flush=True); import os; os.abort()", 134)],
)
def test_the_exit_code_is_the_engines(program, code):
    with running(program) as (process, _):
        process.communicate(timeout=10)
        assert process.returncode == code


def test_an_engine_ends_with_what_started_it():
    with running(STARTS) as (process, child):
        [engine] = psutil.Process(process.pid).children()
        process.kill()
        process.wait(10)
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        psutil.Process(child).kill()


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_keeps_a_process_before_the_engine(monkeypatch, terminal):
    calls = []
    monkeypatch.setattr(os, "isatty", lambda _: terminal)
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    monkeypatch.setattr(module, "check_reachable", lambda _: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        module.serve(Settings.load({"model": "org/model", "device": "cpu"}), lambda _: None)
        assert (signal.getsignal(signal.SIGINT) == signal.SIG_IGN) == terminal
    finally:
        signal.signal(signal.SIGINT, before)
    [(program, argv, _)] = calls
    wrapped = argv[:3] == [sys.executable, "-m", foreground.__name__]
    assert (program, wrapped) == (argv[0], terminal)
