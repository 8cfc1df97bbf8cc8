"""What a chunk store has counted."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened since the store was opened, and the bytes it holds now.

    `misses` counts reads that delivered nothing, `dropped` puts that stored nothing, `corrupt`
    files removed because their content was not what it should be, `errors` failed system calls.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    errors: int = 0
    bytes: int = 0
