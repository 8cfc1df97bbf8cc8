"""What this package uses of LMCache's in-process mode is imported from where LMCache keeps it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lmcache_xpu.versions import lmcache

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


@pytest.mark.parametrize("name", lmcache.MODULES)
def test_every_name_is_there(name: str):
    if "integration" in lmcache.MODULES[name]:
        pytest.importorskip("vllm")
    assert getattr(lmcache, name).__module__.startswith(lmcache.in_process_package())


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
