"""What the tests of installing share: the bases' packages, and uv as it is configured here.

`bases/` has what each base of an image for Intel GPUs has of the packages that are needed; the head
of each file says where that comes from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASES = {file.stem: file for file in sorted((ROOT / "tests/bases").glob("*.txt"))}
# What uv says when it can't reach an index.
UNREACHABLE = ("Failed to fetch", "Request failed", "Could not connect", "error sending request")


def pins(base: str) -> dict[str, str]:
    """Package -> its version in a base."""
    lines = BASES[base].read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def environment() -> dict[str, str]:
    """This process's environment with uv on the PATH, and no other settings of uv or pip's."""
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "UV_HTTP_TIMEOUT": "60"}


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run uv, or what runs it; the test is skipped where there is no package index."""
    done = subprocess.run(
        command,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode and (said := [words for words in UNREACHABLE if words in done.stdout]):
        pytest.skip(f"no package index can be reached here: {said[0]}")
    return done


def uv(*arguments: str, python: str = sys.executable) -> str:
    """Run `uv pip ARGUMENTS` for a Python, with find-links as pip is configured."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from environment import pip_find_links
    finally:
        sys.path.pop(0)
    env = environment()
    if links := pip_find_links(Path(sys.executable)):
        env.setdefault("UV_FIND_LINKS", links)
    done = run("uv", "pip", arguments[0], "--python", python, *arguments[1:], env=env)
    assert done.returncode == 0, done.stdout
    return done.stdout
