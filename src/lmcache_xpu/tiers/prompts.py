"""The prompts whose chunks look-ups have missed: a tier forgets the end of a prompt first.

A chunk is of no use without those before it, and a store of one step names its own chunks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey

__all__ = ["Prompt", "Prompts"]

_AWAITED = 2**16  # chunks that look-ups have missed, at most


@dataclass(slots=True)
class Prompt:
    """The chunks of a prompt, in order.

    Attributes:
        keys: of the chunks.
        used_ns: on disk, the time of last use of the first; each later one counts as older. 0
            before its first store.
    """

    keys: Sequence[CacheEngineKey]
    used_ns: int = 0


class Prompts:
    """Prompts, by chunk that a look-up missed. Not thread-safe."""

    def __init__(self) -> None:
        self._by_chunk: dict[CacheEngineKey, tuple[Prompt, int]] = {}

    def missed(self, keys: Sequence[CacheEngineKey], held: int) -> None:
        """Remember a prompt of which a tier holds the first `held` chunks."""
        if len(self._by_chunk) > _AWAITED:
            self._by_chunk.clear()
        prompt = Prompt(keys)
        for place in range(held, len(keys)):
            self._by_chunk[keys[place]] = prompt, place

    def find(self, key: CacheEngineKey) -> tuple[Prompt, int] | None:
        """Return the prompt that a chunk was last looked up in, and its place there."""
        return self._by_chunk.get(key)
