"""`make help` is a page that can be read: groups, one column of names, short lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
LINE = re.compile(r"^  ([a-z-]+) +(\S.*)$")


def test_help_names_every_target_in_a_group_and_in_one_column():
    # Within a make, another make says which directory it enters and leaves.
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    groups = re.split(r"^\n?([A-Z].*)\n", shown.stdout, flags=re.MULTILINE)[1:]
    lines = [LINE.match(line) for text in groups[1::2] for line in text.strip("\n").splitlines()]
    assert None not in lines
    assert {line.start(2) for line in lines} == {22}
    assert max(len(line.string) for line in lines) <= 92
    [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    names = [line[1] for line in lines]
    assert sorted(names) == sorted(set(phony.split()) - {"help"})
    assert len(names) < 25
    assert groups[::2] == ["Try it", "Run it with Docker", "Measure", "Test", "Develop"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["test", "PART=gpu"],
            "PART=gpu; expected one of: bases lmcache loadtests models ranks tools",
        ),
        (["test", "PART=lmcache"], "LMCACHE=... is missing"),
        (["loadtest"], "HOST=http://... is missing"),
    ],
)
def test_a_wrong_word_is_refused_with_those_that_are_expected(words, said):
    command = ["make", "-n", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("part", ["loadtests", "tools", "models", "ranks", "bases"])
def test_the_files_of_each_part_are_there(part):
    command = ["make", "-n", "test", f"PART={part}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = re.findall(r"tests/\S+\.py", done.stdout)
    assert files or part in ("loadtests", "tools")
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_all_tests_that_run_alone_are_where_they_are_looked_for():
    places = re.findall(r"(?:pytest|:=) (\S+) -m \"?alone\b", MAKEFILE)
    marked = {
        str(path.relative_to(ROOT).parent)
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^(pytestmark|\s*@).*\bmark\.alone\b", path.read_text(), re.MULTILINE)
    }
    assert marked == set(places)
