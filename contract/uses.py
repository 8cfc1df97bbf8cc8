"""Where `src/lmcache_xpu` uses vLLM and LMCache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

from contract.modules import Modules

__all__ = ["SOURCE", "Subclass", "place", "subclasses"]

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGES = ("vllm", "lmcache")


@dataclass(frozen=True)
class Subclass:
    """A class of this package that extends one of theirs.

    Args:
        ours: the class.
        base: dotted name of the one that it extends.
        names: of all members that it and the classes of this package between them define.
        is_extended: another class of this package extends it.
    """

    ours: griffe.Class
    base: str
    names: frozenset[str]
    is_extended: bool

    @property
    def methods(self) -> dict[str, griffe.Object]:
        """The methods and properties that the class itself defines."""
        members = self.ours.members.items()
        return {
            name: each
            for name, each in members
            if isinstance(each, griffe.Function)
            or (isinstance(each, griffe.Attribute) and "property" in each.labels)
        }


@cache
def subclasses() -> tuple[Subclass, ...]:
    """Return the classes that extend classes of vLLM or LMCache, also by way of others of ours."""
    return tuple(_subclasses(Modules(SOURCE)))


def _subclasses(source: Modules) -> Iterator[Subclass]:
    modules = [module for name in source.names() if (module := source.module(name)) is not None]
    classes = [each for module in modules for each in module.members.values()]
    lineages = [list(source.lineage(each)) for each in classes if isinstance(each, griffe.Class)]
    extended = {parent.path for _, *parents in lineages for parent in parents}
    for lineage in lineages:
        ours = lineage[0]
        names = frozenset(member for each in lineage for member in each.members)
        for base in (base for each in lineage for base in each.bases):
            origin = source.origin(base if isinstance(base, str) else base.canonical_path)
            if origin.split(".")[0] in PACKAGES:
                yield Subclass(ours, origin, names, ours.path in extended)


@cache
def _lines() -> tuple[tuple[str, int, str], ...]:
    return tuple(
        (str(path.relative_to(ROOT)), number, line)
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
    )


@cache
def place(name: str) -> str:
    """Return the first `file:line` that uses a dotted name by its last part; empty if none does.

    Not by type: a line that uses the same name of something else may come first.
    """
    parts = name.removesuffix(".__init__").split(".")
    last = re.escape(parts[-1])
    imported = rf"\bimport\b.*\b{last}\b|^ {{4,8}}{last},$"
    used = rf"""\bdef {last}\(|\.{last}\b|\b{last}\b ?[=:(]|["']{last}["']|\b{last}\b"""
    for pattern in (imported, *used.split("|")):
        for path, number, line in _lines():
            if re.search(pattern, line) and not line.lstrip().startswith("#"):
                return f"{path}:{number}"
    return ""
