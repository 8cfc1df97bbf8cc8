"""What docker/cache-server hands to the server's program, seen by one of that name in its place."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "docker/cache-server"
SERVER = """#!/bin/sh
printf '%s\\n' "LMCACHE_TRACK_USAGE=$LMCACHE_TRACK_USAGE" "PYTHONHASHSEED=$PYTHONHASHSEED" "$@"
"""


def run_program(folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it with these variables; it prints two of those that it exports, and the arguments."""
    program = folder / "lmcache-xpu-server"
    program.write_text(SERVER)
    program.chmod(0o755)
    return subprocess.run(
        [PROGRAM],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
    )


def options(folder: Path, environ: Mapping[str, str]) -> dict[str, str | bool]:
    """Its options by name; a flag is True."""
    done = run_program(folder, environ)
    assert (done.returncode, done.stderr) == (0, "")
    usage, seed, socket, pages, *words = done.stdout.splitlines()
    assert (usage, seed) == ("LMCACHE_TRACK_USAGE=false", "PYTHONHASHSEED=0")
    return {"socket": socket, "pages": pages, **by_name(words)}


def by_name(words: list[str]) -> dict[str, str | bool]:
    """Options by name, of a command line that has nothing else."""
    named: dict[str, str | bool] = {}
    for word in words:
        if word.startswith("--"):
            named[word] = True
            last = word
        else:
            named[last] = word
    return named


def disk(named: Mapping[str, str | bool]) -> dict | None:
    """The disk tier's option, read; None without."""
    value = named.get("--l2-adapter")
    return json.loads(value) if isinstance(value, str) else None
