"""Prompts that share prefixes, as token ids, and the lengths that a hit can have."""

from __future__ import annotations

import random
from collections.abc import Iterator

from engine import CHUNK

FIRST, LAST = 300, 4000  # tokens of EXACT's vocabulary without special ones


def tokens(seed: object, length: int) -> list[int]:
    """A prompt of its own; equal for equal seeds."""
    chosen = random.Random(str(seed))
    return [chosen.randrange(FIRST, LAST) for _ in range(length)]


def whole(length: int) -> int:
    """Tokens of a prompt that a full hit restores: whole chunks, and never its last token."""
    return min(length // CHUNK * CHUNK, length - 1)


def shared(seed: int, count: int, longest: int = 2400) -> Iterator[list[int]]:
    """Prompts that begin as others do, cut anywhere and continued: an endless conversation tree."""
    chosen = random.Random(seed)
    trunks = [tokens((seed, trunk), longest) for trunk in range(12)]
    for number in range(count):
        trunk = chosen.choice(trunks)
        cut = chosen.randrange(1, longest)
        tail = tokens((seed, number), chosen.choice((0, 1, 40, CHUNK, 500)))
        prompt = (trunk[:cut] + tail)[:longest]
        if chosen.random() < 0.5:  # said before, to be said again
            trunks[chosen.randrange(len(trunks))] = prompt + trunk[len(prompt) :]
        yield prompt
