"""The integration tests' hooks reach into the package by name: every name must still be there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.scripts import environment

HOOKS = Path(__file__).parent.parent / "integration_tests" / "hooks"

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
