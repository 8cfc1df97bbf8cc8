"""Variables are nouns that say what they hold."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAY_NOTHING = {"found", "given", "known", "one"}
# What is the case, in an error and in a check of the doctor: names that users' programs hold.
FIELDS = {("src/lmcache_xpu/errors.py", "found"), ("src/lmcache_xpu/doctor/check.py", "found")}


def test_no_variable_is_called_by_a_word_that_says_nothing():
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    said = {
        f"{name}:{line}: {variable}"
        for name in tracked
        if (ROOT / name).exists()
        for line, variable in variables((ROOT / name).read_text())
        if variable in SAY_NOTHING and (name, variable) not in FIELDS
    }
    assert not said, "\n".join(sorted(said))


def test_variables_of_all_kinds_are_seen():
    source = "def f(a, *b, **c):\n  d = [e for e in b]\n  for g in d:\n    lambda h: h.i(j=1)"
    assert {name for _, name in variables(source)} == set("abcdegh")


def variables(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter of a source file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
