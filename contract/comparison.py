"""What sources of vLLM or LMCache have otherwise than it is declared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import griffe

from contract.change import Change, moved
from contract.declaration import STUBS, declared, differences
from contract.extension import extension_changes
from contract.modules import Modules, decorators
from contract.uses import subclasses

__all__ = ["compare", "unexpected"]

POSITIONAL = (
    griffe.ParameterKind.positional_only,
    griffe.ParameterKind.positional_or_keyword,
)
VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


def compare(
    package: str, version: str, sources: Path, declaration: Path = STUBS
) -> tuple[Change, ...]:
    """Return all that a version has otherwise than it is declared.

    Args:
        package: `vllm` or `lmcache`.
        version: of the sources, which decides on what has moved.
        sources: the folder that holds the package.
        declaration: the folder of the stubs.
    """
    modules = Modules(sources)
    changes: list[Change] = []
    missing: set[str] = set()
    for name, expected in declared(package, declaration):
        if any(name.startswith(f"{each}.") for each in missing):
            continue
        actual = modules.find(moved(name, version, modules))
        if actual is None and name.endswith(".__init__"):
            actual = modules.find(moved(name.removesuffix(".__init__"), version, modules))
        if actual is None:
            missing.add(name)
            changes.append(Change(name, _gone(name, modules, sources / package)))
        else:
            changes += _changes(name, expected, actual, modules)
    if declaration == STUBS:
        changes += extension_changes(package, version, sources)
    return tuple(changes)


def unexpected(package: str, version: str, changes: Sequence[Change]) -> list[str]:
    """Return what of a version's changes is not in `differences.toml`, and what there is too much.

    Args:
        package: `vllm` or `lmcache`.
        version: of it.
        changes: all of that version.
    """
    allowed = {d.name for d in differences() if not d.versions.contains(version, True)}
    texts = [
        change.text
        for change in changes
        if not any(change.name == name or change.name.startswith(f"{name}.") for name in allowed)
    ]
    seen = {change.name for change in changes}
    for name in sorted(allowed):
        if name.split(".")[0] == package and name not in seen:
            texts.append(f"{name}: is as declared; differences.toml says that it is not")
    return texts


def _gone(name: str, modules: Modules, folder: Path) -> str:
    above, _, last = name.rpartition(".")
    what = "is not there" if modules.find(above) is not None else "its module is not there"
    if others := definitions(folder).get(last, ()):
        what += f"; {' and '.join(others[:3])} {'has' if len(others) == 1 else 'have'} that name"
    return what


@cache
def definitions(folder: Path) -> dict[str, list[str]]:
    """Return the files of a package in which each class or function is, by its name."""
    files: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for name in re.findall(r"^(?:class|def|async def) (\w+)", path.read_text(), re.MULTILINE):
            files.setdefault(name, []).append(str(path.relative_to(folder.parent)))
    return files


def _changes(
    name: str, expected: griffe.Object, actual: griffe.Object, modules: Modules
) -> Iterator[Change]:
    if isinstance(expected, griffe.Class):
        # LMCache makes the class of its configuration at run time: an attribute of its module.
        if isinstance(actual, griffe.Function):
            yield Change(name, "is a function now, not a class")
    elif isinstance(expected, griffe.Attribute):
        if isinstance(actual, griffe.Function):
            yield Change(name, "is a method now, not an attribute")
    elif isinstance(expected, griffe.Function):
        if isinstance(actual, griffe.Class):
            parameters = list(modules.parameters(actual))
        elif isinstance(actual, griffe.Function):
            parameters = list(actual.parameters)
            yield from _kinds(name, expected, actual)
        elif "property" in actual.labels:
            yield Change(name, "is a property now, not a method")
            return
        else:
            return  # an attribute, which may hold a function
        overridden = _overridden(name)
        yield from _parameters(name, list(expected.parameters), parameters, overridden=overridden)


def _kinds(name: str, expected: griffe.Function, actual: griffe.Function) -> Iterator[Change]:
    before, now = ("async" in each.labels for each in (expected, actual))
    if before != now:
        yield Change(name, "is a coroutine now" if now else "is not a coroutine any more")
    for kind in ("classmethod", "staticmethod"):
        before, now = (kind in decorators(each) for each in (expected, actual))
        if before != now:
            yield Change(name, f"is a {kind} now" if now else f"is not a {kind} any more")


def _parameters(
    name: str,
    expected: Sequence[griffe.Parameter],
    actual: Sequence[griffe.Parameter],
    *,
    overridden: bool,
) -> Iterator[Change]:
    """Yield what of a signature has changed.

    A method that we call must take what we pass and want nothing else. One that we override may get
    whatever it takes upstream, so that nothing may be new there either.
    """
    expected = [p for p in expected if p.name not in ("self", "cls")]
    actual = [p for p in actual if p.name not in ("self", "cls")]
    theirs = {p.name: p for p in actual}
    variadic = {p.kind for p in actual if p.kind in VARIADIC}
    names = {p.name for p in expected}
    shown = ", ".join(p.name for p in actual) or "none"
    for parameter in expected:
        if parameter.kind in VARIADIC:
            if parameter.kind not in variadic:
                yield Change(f"{name}(*)", f"takes no *{parameter.name} any more")
        elif (now := theirs.get(parameter.name)) is None:
            if not variadic:
                yield Change(
                    f"{name}({parameter.name})",
                    f"parameter {parameter.name} is gone; its parameters: {shown}",
                )
        elif parameter.default is not None and now.default is None:
            yield Change(f"{name}({parameter.name})", f"parameter {parameter.name} is required now")
        elif parameter.kind in POSITIONAL and now.kind not in POSITIONAL:
            yield Change(
                f"{name}({parameter.name})", f"parameter {parameter.name} is a keyword only now"
            )
    for parameter in actual:
        if parameter.name in names or parameter.kind in VARIADIC:
            continue
        key = f"{name}({parameter.name})"
        if parameter.default is None:
            yield Change(key, f"new required parameter {parameter.name}")
        elif overridden and not any(p.kind in VARIADIC for p in expected):
            yield Change(key, f"new parameter {parameter.name}, which our override may be given")
    ours = [p.name for p in expected if p.kind in POSITIONAL and p.name in theirs]
    order = [p.name for p in actual if p.name in ours]
    if ours != order:
        yield Change(f"{name}()", f"the parameters' order is {', '.join(order)} now")


def _overridden(name: str) -> bool:
    holder, _, method = name.rpartition(".")
    return any(each.base == holder and method in each.methods for each in subclasses())
