"""Code that tests run in processes of their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.forks import Forks

from lmcache_xpu.versions import UNTESTED_VARIABLE

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"


def environment(first: Iterable[Path] = (), **changes: str) -> dict[str, str]:
    """Return the variables of a process that knows the package and the tests' support beside this.

    `PYTHONHASHSEED` and LMCache's and this package's variables are not inherited, so that what a
    test sets is all there is; but for the one with which a version is tried that is not accepted.

    Args:
        first: directories that come before the package on the path.
        changes: more variables, and others than this process has.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONHASHSEED", "PROMETHEUS_MULTIPROC_DIR")
        and (name == UNTESTED_VARIABLE or not name.startswith(("LMCACHE", "VLLM_")))
    }
    paths = [*map(str, (*first, SOURCE, TESTS)), inherited.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**inherited, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **changes}


def threads_of_ranks(ranks: int) -> dict[str, str]:
    """Return the variables of several ranks on CPU: a thread each, by turns on two cores."""
    binds = "|".join(str(number % 2) for number in range(ranks))
    return {"VLLM_CPU_OMP_THREADS_BIND": binds, "OMP_NUM_THREADS": "1"}


def printed(done: subprocess.CompletedProcess[str]) -> dict:
    """Return the JSON object that a process printed last; the test fails where there is none."""
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        pytest.fail(f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}")
    return json.loads(lines[-1])


def run_script(script: str, *, timeout: float = 240, **variables: str) -> dict:
    """Run Python code in a process of its own, and return the JSON object that it prints last."""
    return printed(_run("-c", script, timeout=timeout, env=environment(**variables)))


def run_in_fork(script: str, *, timeout: float = 240, **variables: str) -> dict:
    """Run Python code as `run_script` does, in a process that begins with vLLM imported."""
    return printed(forks().run(["-c", script], timeout, **variables))


def run_probe(
    name: str, *args: object, timeout: float = 280, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a probe, which is a module of this package; its docstring names the arguments.

    Args:
        name: of the module, without `_probe`.
        args: of the command line.
        timeout: seconds.
        env: variables of an interpreter of its own, which has another hash seed than any other;
            None for a process that begins with vLLM imported. With the argument `newer` none does,
            because `newer_runner` comes before vLLM.
    """
    program = ["-m", f"support.{name}_probe", *map(str, args)]
    if env is None and "newer" not in program:
        return forks().run(program, timeout)
    return _run(*program, timeout=timeout, env=env or environment())


@functools.cache
def forks() -> Forks:
    """Return the process that forks for this one."""
    return Forks(environment())


def _run(*args: str, timeout: float, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=timeout
    )
