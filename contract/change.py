"""A name that is not as it is declared."""

from __future__ import annotations

from dataclasses import dataclass

from contract.declaration import moves
from contract.modules import Modules
from contract.uses import place

__all__ = ["Change", "moved"]


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


def moved(name: str, version: str, modules: Modules) -> str:
    """Return the name in a version, of what may be in another package there."""
    for move in moves():
        inside = name.startswith(f"{move.old}.") and move.versions.contains(version, True)
        if inside and modules.find(name) is None and modules.find(move.of(name)) is not None:
            return move.of(name)
    return name
