"""Code that tests run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_script(script: str, *, timeout: float = 240, **environment: str) -> dict:
    """Run Python code in a process of its own; the JSON object that it prints last.

    The process knows this directory's modules. `PYTHONHASHSEED` and LMCache's and this package's
    variables are not inherited, so that what a test sets is all there is.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONHASHSEED" and not name.startswith(("LMCACHE", "VLLM_"))
    }
    env = {**inherited, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=timeout
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        pytest.fail(f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return json.loads(lines[-1])
