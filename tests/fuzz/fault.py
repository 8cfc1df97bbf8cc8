"""A fault that is planted for the fuzzer to see: it takes one thing that the package does away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock


class Fault(NamedTuple):
    """An attribute that is replaced while a target runs."""

    name: str
    target: str
    owner: Any
    attribute: str
    replacement: Any

    def planted(self) -> contextlib.AbstractContextManager[object]:
        if isinstance(self.owner, dict):
            return mock.patch.dict(self.owner, {self.attribute: self.replacement})
        return mock.patch.object(self.owner, self.attribute, self.replacement)


class Faults(list[Fault]):
    """Faults that are written below one another."""

    def add(self, name: str, target: str, owner: Any, attribute: str) -> Callable[[Any], Any]:
        """What is decorated makes the replacement from the original."""

        def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            original = None if isinstance(owner, dict) else getattr(owner, attribute)
            self.append(Fault(name, target, owner, attribute, make(original)))
            return make

        return add
