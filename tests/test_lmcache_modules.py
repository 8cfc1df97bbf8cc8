"""What this package uses of LMCache's in-process mode is imported from where LMCache keeps it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.installation import uv
from support.scripts import environment, printed

from lmcache_xpu.versions import TESTED, installed, lmcache

ROOT = Path(__file__).resolve().parents[1]
CODE = [
    path
    for folder in ("src", "tests", "integration_tests", "measurements")
    for path in (ROOT / folder).rglob("*.py")
]


def modules(path: Path) -> dict[str, set[str]]:
    """Names that a file imports from each module."""
    return {
        node.module: {alias.name for alias in node.names}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    }


def test_types_are_those_of_the_same_modules():
    stated = modules(Path(lmcache.__file__))
    for name, module in lmcache.MODULES.items():
        assert name in stated[f"lmcache.{module}"]


def test_every_name_is_in_the_installed_lmcache():
    pytest.importorskip("vllm")
    for name, module in lmcache.MODULES.items():
        assert getattr(lmcache, name).__module__ == f"{lmcache.in_process_package()}.{module}"


IMPORT = """
import json
from importlib import metadata
from lmcache_xpu.stock import worker
from lmcache_xpu.versions import lmcache
modules = {name: getattr(lmcache, name).__module__ for name in lmcache.MODULES}
print(json.dumps({"version": metadata.version("lmcache"), "modules": modules}))
"""


@pytest.mark.parametrize("version", sorted({*TESTED["lmcache"]} - {installed().lmcache}))
def test_every_name_is_in_each_other_accepted_lmcache(version: str, tmp_path: Path):
    """Laid over the one that is installed, as `make test PART=lmcache` does for engines."""
    pytest.importorskip("vllm")
    uv("install", "--no-deps", "--target", str(tmp_path), f"lmcache=={version}")
    command = [sys.executable, "-c", IMPORT]
    env = environment(first=[tmp_path])
    moved = printed(subprocess.run(command, env=env, capture_output=True, text=True, timeout=240))
    assert moved["version"] == version
    for name, module in lmcache.MODULES.items():
        assert moved["modules"][name] in (f"lmcache.{module}", f"lmcache.inprocess.{module}")


def test_other_names_are_not():
    with pytest.raises(AttributeError, match=r"lmcache_xpu\.versions\.lmcache.*'Mover'"):
        lmcache.Mover  # noqa: B018


@pytest.mark.parametrize(("moved", "package"), [(True, "lmcache.inprocess"), (False, "lmcache")])
def test_the_package_is_the_one_that_is_there(
    moved: bool, package: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lmcache, "find_spec", lambda name: name if moved else None)
    assert lmcache.in_process_package.__wrapped__() == package


def test_no_other_file_knows_these_modules():
    homes = {f"lmcache.{module}" for module in lmcache.MODULES.values()}
    knowing = {path for path in CODE if homes.intersection(modules(path))}
    assert knowing == {Path(lmcache.__file__)}
