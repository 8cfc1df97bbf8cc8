"""`make setup`: on Pythons that are too old, and where there is nothing to do."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BOOTSTRAP = ROOT / "scripts/bootstrap.py"
# The file, in a Python that says that it is another one.
PRETENDED = """
import runpy, sys
sys.version_info, sys.version = {numbers}, "{text} (main) [GCC]"
sys.modules["environment"] = None  # as if it could not be read
sys.argv = ["scripts/bootstrap.py"]
runpy.run_path("{file}", run_name="__main__")
"""


def test_python_2_and_the_first_of_3_can_read_the_file():
    text = BOOTSTRAP.read_text()
    tree = ast.parse(text, feature_version=(3, 4))
    assert text.isascii()  # Python 2 wants to be told otherwise
    assert "from __future__" not in text
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign)]


@pytest.mark.parametrize("version", ["2.7.18", "3.6.15", "3.10.12", "3.15.0"])
def test_another_python_is_told_what_is_needed(version):
    numbers = tuple(map(int, version.split(".")))
    program = PRETENDED.format(numbers=(*numbers, "final", 0), text=version, file=BOOTSTRAP)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith(f"bootstrap: Python {version} found, 3.11 to 3.14 needed")
    assert "make PYTHON=python3.11" in second


@pytest.fixture
def clone(tmp_path):
    """A clone with an environment that pip and uv would work in: programs that only tell of it."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "uv"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >&2\n')
        (programs / name).chmod(0o755)
    return tmp_path


def bootstrap(clone: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bootstrap.py"], cwd=clone, capture_output=True, text=True
    )


def test_it_says_how_much_it_fetches_and_uv_shows_how_far_it_is(clone):
    done = bootstrap(clone)
    assert done.returncode == 0, done.stderr
    assert re.search(r"downloads about [\d.]+ GiB and installs [\d.]+ GiB", done.stdout)
    [install] = [
        line for line in done.stderr.splitlines() if line.endswith("-e .[cpu,dev,docs,loadtest]")
    ]
    assert not {"-q", "--quiet", "--no-progress"} & set(install.split())


def test_it_is_quiet_when_there_is_nothing_to_do(clone):
    bootstrap(clone)
    done = bootstrap(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with (clone / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert "updating .venv" in bootstrap(clone).stdout
