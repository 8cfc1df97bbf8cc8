"""A process ends when its parent has, whatever it waits for, or when its start has failed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.scripts import environment

# A child that waits in C and keeps a thread, as a worker does whose peers have ended.
FAMILY = """
import multiprocessing, os, signal, sys, threading, time
from lmcache_xpu.vllm_hooks import process_end
process_end.END_S, process_end._POLL_S = 1.0, 0.1

def child(pids):
    threading.Thread(target=threading.Event().wait, args=(60,)).start()
    HOW
    pids.send(os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.sigtimedwait([signal.SIGUSR1], 60)

if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    ours, theirs = context.Pipe(duplex=False)
    context.Process(target=child, args=(theirs,), daemon=True).start()
    print(ours.recv(), flush=True)
    END
"""
WATCH = "process_end.end_with_parent()"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAIL = """
    try:
        with process_end.ending_on_failure():
            raise ValueError("planted")
    except ValueError:
        pass  # as far as it got, it waits for others
"""


def run(tmp_path: Path, how: str, end: str, method: str = "fork") -> tuple[int, str]:
    """The child's id, after its parent has ended; and what both said."""
    script = tmp_path / "family.py"
    text = FAMILY.replace("HOW", how.strip()).replace("END_S", "\0").replace("END", end)
    script.write_text(text.replace("\0", "END_S").replace("METHOD", method))
    with (tmp_path / "log").open("w+") as log:
        done = subprocess.run(
            [sys.executable, script], env=environment(), stdout=subprocess.PIPE, stderr=log,
            text=True, timeout=60,
        )  # fmt: skip
        child = int(done.stdout)
        deadline = time.monotonic() + 30
        while running(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        log.seek(0)
        return child, log.read()


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_ends_with_its_parent_and_says_where_it_was(method: str, tmp_path: Path):
    child, said = run(tmp_path, WATCH, KILL, method)
    assert not running(child)
    assert "which started this one, has ended; this one ends within 1 s" in said
    assert "Timeout" in said
    assert "in child" in said  # where its main thread was


def test_a_child_whose_start_failed_ends_though_its_main_thread_waits(tmp_path: Path):
    child, said = run(tmp_path, FAIL, "time.sleep(5)")
    assert not running(child)
    assert "Timeout" in said


def test_a_process_of_the_user_outlives_its_parent():
    """Such as a script that an ended shell has started."""
    script = f"""
import os, time
from lmcache_xpu.vllm_hooks import process_end
process_end.END_S, process_end._POLL_S = 0.3, 0.05
if os.fork():
    os._exit(0)
{WATCH}
time.sleep(1.5)
print("goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "goes on\n", done.stderr


START = """
import threading
from lmcache_xpu.vllm_hooks.process_end import ending_on_failure
threading.Thread(target=threading.Event().wait, args=(60,)).start()
with ending_on_failure():
    FAIL
print("it goes on")
"""


@pytest.mark.parametrize("error", ["ValueError('planted')", "KeyboardInterrupt('planted')"])
def test_the_process_ends_with_the_error(error: str):
    done = subprocess.run(
        [sys.executable, "-c", START.replace("FAIL", f"raise {error}")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == error.replace("('", ": ").replace("')", "")
