"""A failure ends its process, though a thread or another rank would keep it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.scripts import environment, run_script

START = """
import threading
from lmcache_xpu.kv_connector.failures import ending_on_failure
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


STEP = """
import json
import multiprocessing
import time
from lmcache_xpu.kv_connector.failures import ending_rank_on_failure
def worker(ranks, error):
    try:
        with ending_rank_on_failure(ranks):
            if error:
                raise RuntimeError("planted")
    except RuntimeError:
        pass  # as vLLM's worker, which answers and waits for the next step
    time.sleep(4)
context = multiprocessing.get_context("fork")
workers = [context.Process(target=worker, args=case) for case in ((2, True), (1, True), (2, False))]
for each in workers:
    each.start()
for each in workers:
    each.join()
worker(2, True)  # not a process of vLLM's
print(json.dumps([each.exitcode for each in workers]))
"""


def test_a_step_that_fails_ends_one_of_several_ranks():
    assert run_script(STEP) == [1, 0, 0]
