"""What has changed for classes of this package that extend or hook theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

from contract.change import Change, moved
from contract.declaration import passed, stubs
from contract.modules import Modules, decorators, text_of
from contract.uses import subclasses

__all__ = ["extension_changes", "new_methods"]

HOOKED = {"vllm.v1.worker.gpu_worker.Worker"}  # gets a class of ours at run time


def extension_changes(package: str, version: str, sources: Path) -> Iterator[Change]:
    """Yield what a version's sources have otherwise than our subclasses rest on.

    Args:
        package: `vllm` or `lmcache`.
        version: of the sources.
        sources: the folder that holds the package.
    """
    modules = Modules(sources)
    yield from _abstract(package, version, modules)
    yield from _unset(package, version, modules)
    yield from _unpassed(package, version, modules)
    yield from _uncalled(package, version, sources)


def _abstract(package: str, version: str, modules: Modules) -> Iterator[Change]:
    """Yield abstract methods of theirs that a class of ours does not define."""
    for each in subclasses():
        upstream = modules.find(moved(each.base, version, modules))
        if each.is_extended:
            continue
        if each.base.split(".")[0] != package or not isinstance(upstream, griffe.Class):
            continue
        defined = set(each.names)
        for kind in modules.lineage(upstream):
            for name, member in kind.members.items():
                if isinstance(member, griffe.Function) and name not in defined:
                    defined.add(name)
                    if any(d.endswith("abstractmethod") for d in decorators(member)):
                        what = f"is abstract, and {each.ours.path} lacks it"
                        yield Change(f"{each.base}.{name}", what)


def _is_hook(base: str, method: str) -> bool:
    """Whether a class of theirs has a method from a class of the other package, which calls it."""
    declarations = stubs()
    kind = declarations.find(base)
    return isinstance(kind, griffe.Class) and any(
        method in each.members
        for each in declarations.lineage(kind)
        if each.path.split(".")[0] != base.split(".")[0]
    )


def _uncalled(package: str, version: str, sources: Path) -> Iterator[Change]:
    """Yield methods that we override, and nothing calls by this name any more."""
    modules, names = Modules(sources), attributes(sources / package)
    for each in subclasses():
        if each.base.split(".")[0] != package:
            continue
        for method in each.methods:
            name = f"{each.base}.{method}"
            special = method.startswith("__") or method in names or _is_hook(each.base, method)
            if not special and modules.find(moved(name, version, modules)) is not None:
                yield Change(f"{name}(called)", f"is overridden, and nothing calls {method}")


def _unset(package: str, version: str, modules: Modules) -> Iterator[Change]:
    """Yield attributes that a constructor of theirs sets, and ours, which replaces it, does not."""
    for each in subclasses():
        ours = each.ours.members.get("__init__")
        name = f"{each.base}.__init__"
        theirs = modules.find(moved(name, version, modules))
        if each.base.split(".")[0] != package or not isinstance(ours, griffe.Function):
            continue
        if not isinstance(theirs, griffe.Function) or "super().__init__" in text_of(ours):
            continue
        there = set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", text_of(theirs)))
        here = set(re.findall(r"\bself\.(\w+)", text_of(ours))) | each.names
        for attribute in sorted(there - here):
            what = f"sets {attribute}, which {each.ours.path} sets not"
            yield Change(f"{name}({attribute})", what)


def _unpassed(package: str, version: str, modules: Modules) -> Iterator[Change]:
    """Yield keyword arguments that nobody passes to methods of ours any more."""
    for each in passed():
        if each.by.split(".")[0] != package or not each.versions.contains(version, True):
            continue
        module = modules.find(moved(each.by, version, modules))
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
