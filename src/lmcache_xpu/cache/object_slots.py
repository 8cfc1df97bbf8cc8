"""The objects that the server names in an answer: where they lie, and which chunks they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    def read(cls, context: Mapping[str, Any]) -> Self:
        """Read LMCache's answer, of one group; it names chunks, or it names all.

        Raises:
            TransferError: an answer of another form.
        """
        try:
            slots = [(int(slot["offset"]), int(slot["length"])) for slot in context["slots"]]
            numbers = [int(n) for n in context.get("chunk_indices", range(len(slots)))]
            rows = [(0, n, *slot) for n, slot in zip(numbers, slots, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(
                f"an answer of LMCache's server {context!r:.200}", "slots"
            ) from error
        return cls.of_rows(rows, 1)

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, int, int]], groups: int) -> Self:
        """Return objects by their groups, chunks, offsets and lengths.

        Raises:
            TransferError: objects of other groups.
        """
        if any(not 0 <= row[0] < groups for row in rows):
            named = sorted({row[0] for row in rows})
            raise TransferError(f"objects of groups {named}", f"of {groups} groups")
        by_group = [[row for row in rows if row[0] == group] for group in range(groups)]
        return cls(
            tuple(tuple((offset, length) for *_, offset, length in group) for group in by_group),
            tuple(tuple(number for _, number, *_ in group) for group in by_group),
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
