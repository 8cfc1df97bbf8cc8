"""`make setup`: on Pythons that are too old, and where there is nothing to do."""

from __future__ import annotations

import ast
import re
import shutil
import signal
import subprocess
import sys
import time
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


def test_it_says_how_much_it_fetches_and_keeps_what_uv_says_in_a_file(clone):
    done = bootstrap(clone)
    assert done.returncode == 0, done.stderr
    assert re.search(r"downloads about [\d.]+ GiB and installs [\d.]+ GiB", done.stdout)
    assert done.stdout.count("\n") == 3  # the third is of signs of life
    install = (clone / ".venv/bootstrap.log").read_text()
    assert install.endswith("-e .[cpu,dev,docs,loadtest]\n")
    assert install not in done.stderr


def test_what_uv_said_last_is_shown_when_it_fails(clone):
    uv = clone / ".venv/bin/uv"
    uv.write_text('#!/bin/sh\nfor i in $(seq 100); do echo "line $i"; done\nexit 1\n')
    done = bootstrap(clone)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-22:-2] == [f"line {i}" for i in range(81, 101)]
    assert "uv could not install the packages" in done.stderr
    assert "setting up .venv" in bootstrap(clone).stdout  # the next one begins anew


def test_ctrl_c_ends_it_with_a_word(clone):
    uv, began = clone / ".venv/bin/uv", clone / "began"
    install = f'[ "$3" != "--dry-run" ] || exit 0\ntouch {began}\nexec sleep 60\n'
    uv.write_text(f"#!/bin/sh\n{install}")
    command = [sys.executable, "scripts/bootstrap.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=clone, preexec_fn=interruptible, **streams) as process:
        while not began.exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=5)
    assert process.returncode == 1
    assert said.endswith("\nbootstrap: interrupted; run it again to go on.\n")
    assert "Traceback" not in said


def interruptible():
    """A shell lets what it starts in the background ignore Ctrl-C, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_it_is_quiet_when_there_is_nothing_to_do(clone):
    bootstrap(clone)
    done = bootstrap(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with (clone / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert "updating .venv" in bootstrap(clone).stdout
