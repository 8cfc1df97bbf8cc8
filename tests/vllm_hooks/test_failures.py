"""A start that fails ends its process, though a thread would keep it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.scripts import environment

START = """
import threading
from lmcache_xpu.vllm_hooks.failures import ending_on_failure
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
