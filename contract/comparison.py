"""What sources of vLLM or LMCache have otherwise than it is declared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

from contract.declaration import STUBS, declared, differences, moves, passed
from contract.modules import Modules
from contract.uses import place, subclasses

__all__ = ["Change", "compare", "new_methods", "unexpected"]

POSITIONAL = (
    griffe.ParameterKind.positional_only,
    griffe.ParameterKind.positional_or_keyword,
)
HOOKED = {"vllm.v1.worker.gpu_worker.Worker"}  # gets a class of ours at run time
VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


@dataclass(frozen=True)
class Change:
    """One name that is not as it is declared.

    Args:
        name: dotted; with `(parameter)` of one parameter.
        what: the change, in words.
    """

    name: str
    what: str

    @property
    def text(self) -> str:
        """The change, and where it matters."""
        dotted = self.name.partition("(")[0]
        used = place(dotted)
        return f"{dotted}: {self.what}" + (f" (used in {used})" if used else "")


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
        actual = modules.find(_moved(name, version, modules))
        if actual is None and name.endswith(".__init__"):
            actual = modules.find(_moved(name.removesuffix(".__init__"), version, modules))
        if actual is None:
            missing.add(name)
            changes.append(Change(name, _gone(name, modules, sources / package)))
        else:
            changes += _changes(name, expected, actual, modules)
    if declaration == STUBS:
        changes += _abstract(package, version, modules)
        changes += _unpassed(package, version, modules)
        changes += _uncalled(package, version, sources)
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


def _moved(name: str, version: str, modules: Modules) -> str:
    """Return the name in a version, of what may be in another package there."""
    for move in moves():
        inside = name.startswith(f"{move.old}.") and move.versions.contains(version, True)
        if inside and modules.find(name) is None and modules.find(move.of(name)) is not None:
            return move.of(name)
    return name


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
    for label, text in (("async", "a coroutine"),):
        before, now = label in expected.labels, label in actual.labels
        if before != now:
            yield Change(name, f"is {text} now" if now else f"is not {text} any more")
    for kind in ("classmethod", "staticmethod"):
        before, now = (kind in _decorators(each) for each in (expected, actual))
        if before != now:
            yield Change(name, f"is a {kind} now" if now else f"is not a {kind} any more")


def _decorators(function: griffe.Function) -> list[str]:
    return [str(decorator.value) for decorator in function.decorators]


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


def _abstract(package: str, version: str, modules: Modules) -> Iterator[Change]:
    """Yield abstract methods of theirs that a class of ours does not define."""
    for each in subclasses():
        upstream = modules.find(_moved(each.base, version, modules))
        if each.is_extended:
            continue
        if each.base.split(".")[0] != package or not isinstance(upstream, griffe.Class):
            continue
        defined = set(each.names)
        for kind in modules.lineage(upstream):
            for name, member in kind.members.items():
                if isinstance(member, griffe.Function) and name not in defined:
                    defined.add(name)
                    if any(d.endswith("abstractmethod") for d in _decorators(member)):
                        what = f"is abstract, and {each.ours.path} lacks it"
                        yield Change(f"{each.base}.{name}", what)


def _uncalled(package: str, version: str, sources: Path) -> Iterator[Change]:
    """Yield methods that we override, and nothing calls by this name any more."""
    modules, names = Modules(sources), attributes(sources / package)
    for each in subclasses():
        if each.base.split(".")[0] != package:
            continue
        for method in each.methods:
            name = f"{each.base}.{method}"
            special = method.startswith("__") or method in names
            if not special and modules.find(_moved(name, version, modules)) is not None:
                yield Change(f"{name}(called)", f"is overridden, and nothing calls {method}")


def _unpassed(package: str, version: str, modules: Modules) -> Iterator[Change]:
    """Yield keyword arguments that nobody passes to methods of ours any more."""
    for each in passed():
        if each.by.split(".")[0] != package or not each.versions.contains(version, True):
            continue
        module = modules.find(_moved(each.by, version, modules))
        file = None if module is None else module.filepath
        text = file.read_text() if isinstance(file, Path) and file.is_file() else ""
        for keyword in each.keywords:
            if not re.search(rf"""\b{keyword}=|["']{keyword}["']""", text):
                yield Change(f"{each.by}({keyword})", f"does not pass {keyword} to {each.to}")


def attributes(folder: Path) -> frozenset[str]:
    """Return every name that follows a dot in a package, but for what vLLM's KV connectors say.

    Those pass calls on to each other; all that counts is who calls one.
    """
    connectors = folder / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    interface = {connectors / "base.py", connectors / "metrics.py"}
    return frozenset(
        name
        for path in folder.rglob("*.py")
        if path in interface or not path.is_relative_to(connectors)
        for name in re.findall(r"(?<!super\(\))\.(\w+)", path.read_text())
    )


def new_methods(package: str, before: Path, after: Path) -> list[str]:
    """Return public methods that came between two versions to classes that ours extend or hook."""
    bases = {each.base for each in subclasses()} | HOOKED
    names: list[str] = []
    for base in sorted(each for each in bases if each.split(".")[0] == package):
        old, new = (_public(base, Modules(sources)) for sources in (before, after))
        if old and new:
            names += [f"{base}.{name}" for name in sorted(new - old)]
    return names


def _public(base: str, modules: Modules) -> set[str]:
    kind = modules.find(base)
    if not isinstance(kind, griffe.Class):
        return set()
    return {
        name
        for each in modules.lineage(kind)
        for name, member in each.members.items()
        if not name.startswith("_") and isinstance(member, griffe.Function)
    }
