"""The integration tests' hooks reach into the package by public names, and all must still be there.

A private name would tie them to how a module does its work.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import environment

HOOKS = Path(__file__).parent.parent / "integration_tests" / "hooks"
PRIVATE = re.compile(r"_(?!_)\w*")
PUBLIC_ALL_THE_SAME = {"_", "_replace"}  # of named tuples

# Hooks replace attributes: none may be missing before, or be new afterwards.
PROBE = """
import importlib, inspect, planted, broken

def names(module):
    owners = [module, *(v for v in vars(module).values() if inspect.isclass(v))]
    return {(owner.__name__, name) for owner in owners for name in dir(owner)}

for name in planted.MODULES:
    module = importlib.import_module(name)
    before = names(module)
    planted.plant(module)
    assert names(module) == before, names(module) - before
for (part, name), way in broken.WAYS.items():
    module = importlib.import_module(name)
    before = names(module)
    way(module)
    assert names(module) <= before, (part, names(module) - before)
print(len(planted.MODULES), len(broken.WAYS))
"""


def test_hooks_replace_what_is_there(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment(first=(HOOKS,), HOOKS_DIRECTORY=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    planted, broken = map(int, done.stdout.split()[-2:])
    assert planted >= 5
    assert broken >= 15


def private_names(source: str) -> set[str]:
    """Names with a leading underscore that are reached as attributes, in strings or by import."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(node.value.split("."))  # of getattr and its like
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return {name for name in names if PRIVATE.fullmatch(name)} - PUBLIC_ALL_THE_SAME


@pytest.mark.parametrize("file", sorted(HOOKS.glob("*.py")), ids=lambda file: file.stem)
def test_hooks_reach_public_names_alone(file: Path):
    assert private_names(file.read_text()) == set()


@pytest.mark.parametrize(
    "source", ["a._b", "a._b.c = 1", "getattr(a, '_b')", "patch('a._b')", "from a import _b"]
)
def test_a_private_name_would_be_seen(source: str):
    assert private_names(source) == {"_b"}
