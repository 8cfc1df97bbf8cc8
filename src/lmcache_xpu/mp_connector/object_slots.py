"""The objects that the server names in an answer: where they lie, and which chunks they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from lmcache_xpu.errors import TransferError

__all__ = ["ObjectSlots"]


@dataclass(frozen=True, slots=True)
class ObjectSlots:
    """Objects by group, in the order of chunks.

    Args:
        slots: by group, offset and length in the server's memory.
        numbers: by group, the chunks, counted from the first one of the key.
    """

    slots: tuple[tuple[tuple[int, int], ...], ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, context: Mapping[str, Any], groups: int) -> Self:
        """Read an answer; it names chunks, and groups where there are several, or it names all.

        Raises:
            TransferError: an answer of another form.
        """
        try:
            slots = [(int(slot["offset"]), int(slot["length"])) for slot in context["slots"]]
            of = [int(group) for group in context.get("group_ids", [0] * len(slots))]
            numbers = [int(n) for n in context.get("chunk_indices", range(len(slots)))]
            rows = list(zip(of, numbers, slots, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(
                f"an answer of LMCache's server {context!r:.200}", "slots"
            ) from error
        if any(not 0 <= group < groups for group in of):
            raise TransferError(f"objects of groups {sorted(set(of))}", f"of {groups} groups")
        by_group = [[row for row in rows if row[0] == group] for group in range(groups)]
        return cls(
            tuple(tuple(slot for *_, slot in group) for group in by_group),
            tuple(tuple(number for _, number, _ in group) for group in by_group),
        )

    def __bool__(self) -> bool:
        return any(self.slots)

    def of_group(self, group: int) -> list[tuple[int, int]]:
        """Offsets and lengths of a group's objects."""
        return list(self.slots[group])

    def chunks(self, group: int) -> list[int]:
        """The chunks of a group."""
        return list(self.numbers[group])

    @property
    def ends(self) -> list[int]:
        """Of all objects, the byte behind the last one."""
        return [offset + length for group in self.slots for offset, length in group]

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(length for group in self.slots for _, length in group)
