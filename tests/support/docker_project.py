"""A project directory, and a program in Docker's place that writes down what it is asked."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lmcache_xpu.harness.engine_process import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCKER = """\
#!{python} -SI
import json, os, sys, time
words, crashes = sys.argv[1:], {crashes}
if words == ["compose", "version", "--short"]:
    print("{version}")
with open("{log}", "a") as log:
    names = ("COMPOSE_PROFILES", "RENDER_GID")
    print(json.dumps([words, {{name: os.environ.get(name) for name in names}}]), file=log)
for word, (code, text) in {answers}.items():
    if set(word.split()) <= set(words):
        print(text, file=sys.stderr if code else sys.stdout)
        sys.exit(code)
looks = open("{log}").read().count('"inspect", "-f"')
if crashes is not None and "ps" in words:
    print("c0ffee")
if crashes is not None and "inspect" in words:
    print("c0ffee", 5 + crashes * (looks - 1))  # 5 times in earlier days
if crashes is not None and "--wait" in words:
    time.sleep(0 if {code} else 3)
    sys.exit({code})
"""


class Project:
    """A clone that was just made, with what a new user copies, on a machine without Docker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "docker.log"
        self.dri = folder / "dri"
        self.dri.mkdir(parents=True)
        shutil.copytree(ROOT / "docker", folder / "docker")
        for name in ("Makefile", "compose.yaml"):
            shutil.copy(ROOT / name, folder)
        shutil.copy(ROOT / ".env.example", folder / ".env")
        # Ports of their own, so that what runs on this machine does not count.
        for name in ("API_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "ROUTER_PORT", "LOADTEST_PORT"):
            self.set(name, free_port())
        self.install()

    def install(
        self,
        version: str = "2.26.1",
        *,
        crashes: int | None = None,
        code: int = 0,
        answers: dict[str, tuple[int, str]] | None = None,
    ) -> None:
        """Put a Docker with this version of Compose onto the path.

        Args:
            version: of Compose.
            crashes: how often its one container ends between two looks at it, while a start waits.
            code: what the start ends with; another than 0 at once.
            answers: exit code and words of a call that has all words of the key.
        """
        (self.folder / "bin").mkdir(exist_ok=True)
        program = self.folder / "bin/docker"
        text = DOCKER.format(
            python=sys.executable,
            version=version,
            log=self.log,
            crashes=crashes,
            code=code,
            answers=answers or {},
        )
        program.write_text(text)
        program.chmod(0o755)

    def set(self, name: str, value: object) -> None:
        with (self.folder / ".env").open("a") as file:
            file.write(f"{name}={value}\n")

    def run(self, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
        path = path or f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.folder,
            env={"PATH": path, "DRI_DIR": str(self.dri)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, word: str) -> list[tuple[list[str], dict[str, str | None]]]:
        """The calls of Docker with this word: arguments, and variables that matter."""
        calls = map(json.loads, self.log.read_text().splitlines()) if self.log.exists() else ()
        return [(words, variables) for words, variables in calls if word in words]


def profiles(words: list[str]) -> set[str]:
    return {value for flag, value in itertools.pairwise(words) if flag == "--profile"}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """What it says, but for make's own line."""
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    return line
