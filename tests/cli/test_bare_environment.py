"""The commands in an environment that has this package's wheel and neither vLLM nor PyTorch."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from support.installation import ROOT, run, uv
from support.model_configs import LLAMA_3_8B

COMMANDS = (
    "size t5",
    "size no-such.json",
    "serve model",
    "serve model --dry-run",
    "status --json",
    "status --url http://127.0.0.1:1",
    "demo --work demo",
    "report report.md",
    "bench engine",
    "bench load",
    "bench trace trace.jsonl",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an environment, a model's configuration, and one that needs transformers."""
    place = tmp_path_factory.mktemp("bare")
    done = run("uv", "build", "--wheel", "-q", "--out-dir", str(place), str(ROOT))
    assert done.returncode == 0, done.stdout
    assert run("uv", "venv", "-q", str(place / "env")).returncode == 0
    [wheel] = place.glob("*.whl")
    python = str(place / "env/bin/python")
    uv("install", "-q", str(wheel), python=python)
    for name, config in {"model": LLAMA_3_8B, "t5": {"model_type": "t5"}}.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config))
    return place


def call(place: Path, command: str) -> subprocess.CompletedProcess[str]:
    program = [str(place / "env/bin/lmcache-xpu"), *command.split()]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(place)}
    return subprocess.run(program, cwd=place, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_in_one_line_what_it_lacks(place, command):
    done = call(place, command)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("lmcache-xpu: found ")
    assert done.stderr.count("\n") == 1


def test_sizes_need_no_more_and_two_seconds(place):
    call(place, "size model")  # compiles the modules
    begin = time.monotonic()
    done = call(place, "size model")
    assert time.monotonic() - begin < 2
    assert "131,072 bytes per token" in done.stdout, done.stderr


def test_doctor_and_status_say_what_is_missing(place):
    done = call(place, "doctor")
    assert done.returncode == 1, done.stderr
    assert "Not ready: " in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "vllm        not installed" in call(place, "status").stdout
