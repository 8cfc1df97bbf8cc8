"""A slow part of CI runs where a file of it has changed since it last passed, and not otherwise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("slow_parts.py", "environment.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that has the script and one file of each kind."""
    for name in (
        *(f"scripts/{script}" for script in SCRIPTS),
        "docker/up",
        "loadtests/locustfile.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/results").mkdir(parents=True)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(checkout: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=checkout, check=True, capture_output=True)


def commit(checkout: Path) -> None:
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "state")


def script(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/slow_parts.py", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_a_part_that_passed_is_due_again_when_a_file_of_it_changes(checkout):
    assert script(checkout, "unchanged", "containers").returncode == 1  # it never passed
    assert script(checkout, "passed", "containers", "83 passed").returncode == 0
    commit(checkout)  # of the record itself
    rest = script(checkout, "unchanged", "containers")
    assert rest.returncode == 0
    assert "83 passed" in rest.stdout

    (checkout / "loadtests/locustfile.py").write_text("")
    commit(checkout)
    assert script(checkout, "unchanged", "containers").returncode == 0  # no file of containers
    (checkout / "docker/up").write_text("")
    commit(checkout)
    assert script(checkout, "unchanged", "containers").returncode == 1


def test_a_part_is_not_recorded_for_files_that_no_commit_holds(checkout):
    (checkout / "docker/up").write_text("")
    refused = script(checkout, "passed", "containers", "83 passed")
    assert refused.returncode != 0
    assert "differ from the last commit" in refused.stderr
    assert not (checkout / "docs/results/slow-parts.json").exists()


def test_an_unknown_part_is_an_error_and_no_reason_to_run_nothing(checkout):
    assert script(checkout, "unchanged", "no-such-part").returncode != 0


@pytest.mark.parametrize("record", ["docs/results/slow-parts.json"])
def test_the_record_names_parts_that_exist(record):
    path = ROOT / record
    entries = json.loads(path.read_text()) if path.exists() else {}
    sys.path.append(str(ROOT / "scripts"))
    from slow_parts import PARTS

    assert entries.keys() <= PARTS.keys()
    for files in PARTS.values():
        assert [name for name in files if not (ROOT / name).exists()] == []
