"""What `stubs/` and `differences.toml` declare."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from packaging.specifiers import SpecifierSet

from contract.modules import Modules
from contract.uses import PACKAGES

__all__ = [
    "STUBS",
    "Difference",
    "Move",
    "Passed",
    "checked",
    "declared",
    "differences",
    "moves",
    "passed",
    "stubs",
]

FOLDER = Path(__file__).parent
STUBS = FOLDER / "stubs"


@dataclass(frozen=True)
class Difference:
    """A name that not every version has as it is declared.

    Args:
        name: dotted, as in the stubs; with `(parameter)` of one parameter.
        versions: that have it as it is declared.
        bridge: where the others are dealt with, and how.
    """

    name: str
    versions: SpecifierSet
    bridge: str


@dataclass(frozen=True)
class Move:
    """A package whose modules are below another one in some versions.

    Args:
        old: its name, as the stubs have it.
        new: the other one.
        versions: that have it there.
        bridge: where both are dealt with.
    """

    old: str
    new: str
    versions: SpecifierSet
    bridge: str

    def of(self, name: str) -> str:
        """Return the new name of what is in the package."""
        return self.new + name.removeprefix(self.old)


@dataclass(frozen=True)
class Passed:
    """Keyword arguments that reach a method of ours which takes any.

    Args:
        by: the module that passes them.
        to: the method, in words.
        keywords: their names.
        versions: that have it so; in others nobody looks.
    """

    by: str
    to: str
    keywords: tuple[str, ...]
    versions: SpecifierSet


@cache
def stubs(folder: Path = STUBS) -> Modules:
    """Return the stubs."""
    return Modules(folder, suffix=".pyi")


def declared(package: str, folder: Path = STUBS) -> Iterator[tuple[str, griffe.Object]]:
    """Yield each declared name of a package, and its declaration; a class before its members."""
    for name in stubs(folder).names():
        module = stubs(folder).module(name)
        if module is not None and name.split(".")[0] == package:
            yield from _members(name, module)


def checked(package: str) -> list[str]:
    """Return the versions of a package that are checked, the oldest first."""
    versions: list[str] = _table()["checked"][package]
    return versions


def differences() -> tuple[Difference, ...]:
    """Return what versions are known to lack or to have otherwise."""
    entries = _table().get("difference", ())
    return tuple(Difference(e["name"], SpecifierSet(e["versions"]), e["bridge"]) for e in entries)


def moves() -> tuple[Move, ...]:
    """Return the packages that are known to have moved."""
    entries = _table().get("move", ())
    return tuple(
        Move(e["old"], e["new"], SpecifierSet(e["versions"]), e["bridge"]) for e in entries
    )


def passed() -> tuple[Passed, ...]:
    """Return the keyword arguments that methods of ours are known to get."""
    return tuple(
        Passed(e["by"], e["to"], tuple(e["keywords"]), SpecifierSet(e["versions"]))
        for e in _table().get("passed", ())
    )


def _members(
    prefix: str, holder: griffe.Module | griffe.Class
) -> Iterator[tuple[str, griffe.Object]]:
    for name, member in holder.members.items():
        if isinstance(member, griffe.Alias | griffe.Module):
            continue
        yield f"{prefix}.{name}", member
        if isinstance(member, griffe.Class):
            yield from _members(f"{prefix}.{name}", member)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((FOLDER / "differences.toml").read_text())
    names = [entry["name"] for entry in table.get("difference", ())]
    assert all(name.split(".")[0] in PACKAGES for name in names)
    return table
