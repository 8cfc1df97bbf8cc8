"""Modules as Griffe reads them: one file at a time, when a name of it is asked for.

Griffe's own loader reads whole packages; vLLM has 2,600 files, and the contract is about fifty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import griffe

__all__ = ["Modules", "decorators", "text_of"]

# Methods of the class that LMCache makes of its options; `lmcache.v1.config_base` adds them.
MADE_BY_LMCACHE = ("from_defaults", "get_extra_config_value")


class Modules:
    """The modules below some folders.

    Args:
        folders: that hold packages; the first one that has a module counts.
        suffix: of the files, `.py` or `.pyi`.
    """

    def __init__(self, *folders: Path, suffix: str = ".py") -> None:
        self._folders = folders
        self._suffix = suffix
        self.module = cache(self._module)

    def names(self) -> Iterator[str]:
        """Yield the names of all modules."""
        for folder in self._folders:
            for path in sorted(folder.rglob(f"*{self._suffix}")):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find(self, name: str, seen: frozenset[str] = frozenset()) -> griffe.Object | None:
        """Return what a dotted name stands for, through imports and base classes; None if nothing.

        Args:
            name: `vllm.v1.request.Request.num_tokens`.
            seen: names that led here.
        """
        if name in seen:
            return None
        seen |= {name}
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            holder: griffe.Object | None = self.module(".".join(parts[:count]))
            if holder is not None:
                for part in parts[count:]:
                    if holder is None:
                        return None
                    holder = self._member(holder, part, seen)
                return holder
        return None

    def origin(self, name: str) -> str:
        """Return the name under which another package has what is imported here by a name."""
        parts = name.split(".")
        for count in range(len(parts) - 1, 0, -1):
            module = self.module(".".join(parts[:count]))
            if module is not None:
                member = module.members.get(parts[count])
                if isinstance(member, griffe.Alias):
                    return self.origin(".".join([member.target_path, *parts[count + 1 :]]))
                return name
        return name

    def lineage(self, kind: griffe.Class) -> Iterator[griffe.Class]:
        """Yield a class, and the classes that it extends, as far as they are here."""
        yield kind
        for base in kind.bases:
            path = base if isinstance(base, str) else base.canonical_path
            parent = self.find(path)
            if isinstance(parent, griffe.Class) and parent is not kind:
                yield from self.lineage(parent)

    def parameters(self, kind: griffe.Class) -> Sequence[griffe.Parameter]:
        """Return what the constructor of a class takes: its `__init__`, or its fields."""
        fields: dict[str, griffe.Parameter] = {}
        for each in self.lineage(kind):
            constructor = each.members.get("__init__")
            if isinstance(constructor, griffe.Function):
                return [p for p in constructor.parameters if p.name != "self"]
        for each in reversed(list(self.lineage(kind))):
            for name, field in each.members.items():
                if isinstance(field, griffe.Attribute) and _is_field(field):
                    fields[name] = griffe.Parameter(
                        name,
                        kind=griffe.ParameterKind.positional_or_keyword,
                        default=None if field.value is None else str(field.value),
                    )
        return list(fields.values())

    def _module(self, name: str) -> griffe.Module | None:
        path = Path(*name.split("."))
        for folder in self._folders:
            for file in (
                folder / path / f"__init__{self._suffix}",
                folder / path.with_name(path.name + self._suffix),
            ):
                if file.is_file():
                    return self._visit(name, file)
            if (folder / path).is_dir():
                return griffe.Module(path.name, filepath=[folder / path])
        return None

    def _visit(self, name: str, file: Path) -> griffe.Module:
        above, _, last = name.rpartition(".")
        return griffe.visit(last, filepath=file, code=file.read_text(), parent=_package(above))

    def _member(
        self, holder: griffe.Object, name: str, seen: frozenset[str]
    ) -> griffe.Object | None:
        member = holder.members.get(name)
        if isinstance(member, griffe.Alias):
            return self.find(member.target_path, seen)
        if member is not None:
            return member
        if isinstance(holder, griffe.Module):
            if _assigns(holder, name):
                return griffe.Attribute(name, parent=holder)
            wildcards = [path for path in holder.members if path.endswith("/*")]
            for path in wildcards:
                if (member := self.find(f"{path.removesuffix('/*')}.{name}", seen)) is not None:
                    return member
        if isinstance(holder, griffe.Attribute):
            return self._of_value(holder, name, seen)
        if isinstance(holder, griffe.Class):
            parents = list(self.lineage(holder))
            for parent in parents[1:]:
                if (member := parent.members.get(name)) is not None:
                    return member if isinstance(member, griffe.Object) else None
            for parent in parents:
                if _assigns(parent, name):
                    return griffe.Attribute(name, parent=parent)
        return None

    def _of_value(
        self, value: griffe.Attribute, name: str, seen: frozenset[str]
    ) -> griffe.Object | None:
        """Return an attribute of what an attribute holds: by its annotation, or a class by text."""
        if isinstance(value.annotation, griffe.Expr):
            kind = self.find(value.annotation.canonical_path)
            if isinstance(kind, griffe.Class):
                return self._member(kind, name, seen)
        # LMCache makes the class of its configuration from a table of options.
        file = value.filepath
        text = file.read_text() if isinstance(file, Path) else ""
        if re.search(rf"""["']{name}["']\s*:""", text) or name in MADE_BY_LMCACHE:
            return griffe.Attribute(name, parent=value.parent)
        return None


@cache
def _package(name: str) -> griffe.Module | None:
    """Return an empty package, which tells Griffe the full name of what is below it."""
    if not name:
        return None
    above, _, last = name.rpartition(".")
    return griffe.Module(
        last, filepath=Path(*name.split("."), "__init__.py"), parent=_package(above)
    )


def _is_field(attribute: griffe.Attribute) -> bool:
    annotation = str(attribute.annotation or "")
    return (
        "property" not in attribute.labels
        and bool(annotation)
        and not annotation.startswith("ClassVar")
        and "init=False" not in str(attribute.value or "").replace(" ", "")
    )


def _assigns(holder: griffe.Class | griffe.Module, name: str) -> bool:
    """Whether an attribute is assigned where Griffe does not look.

    It looks into `__init__` alone, of a class, and at no targets that are several.
    """
    file = holder.filepath
    if not isinstance(file, Path) or not file.is_file():
        return False
    if isinstance(holder, griffe.Module):
        return (
            re.search(rf"^(\w+, )*{name}\b(, \w+)* = ", file.read_text(), re.MULTILINE) is not None
        )
    return re.search(rf"\bself\.{name}\b[^=\n(]*=[^=]", text_of(holder)) is not None


def text_of(each: griffe.Class | griffe.Function) -> str:
    """Return the source text of a class or a function."""
    file = each.filepath
    lines = file.read_text().splitlines() if isinstance(file, Path) else []
    return "\n".join(lines[(each.lineno or 1) - 1 : each.endlineno])


def decorators(function: griffe.Function) -> list[str]:
    """Return the decorators of a function, as text."""
    return [str(decorator.value) for decorator in function.decorators]
