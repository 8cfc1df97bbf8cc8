"""The tokens of a trace's prompts: equal blocks get equal tokens, in every run of a salt.

They are sent as token ids. As text, tokens at the border of two blocks could become one, and the
blocks after it would no longer be equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator

import numpy as np

from loadtests.traces.trace import Request

__all__ = ["FIRST_ID", "IDS", "prompt_tokens"]

# Ids that every model has and that mean nothing special: those are the first or the last ones.
FIRST_ID, IDS = 1000, 3000


def prompt_tokens(request: Request, *, block_tokens: int, key: str, alone: str) -> list[int]:
    """Return a prompt's token ids.

    Args:
        request: of the trace.
        block_tokens: that a block holds.
        key: changes all tokens: the run's seed and salt.
        alone: changes the tokens beyond the blocks: the request's own name.
    """
    return list(_tokens(request, block_tokens, key, alone))


def _tokens(request: Request, block_tokens: int, key: str, alone: str) -> Iterator[int]:
    rest = request.input_tokens
    for block in request.blocks:
        yield from _block(key, block, block_tokens)[: max(0, rest)]
        rest -= block_tokens
    if rest > 0:
        yield from _block(key, f"alone {alone}", rest)


def _block(key: str, name: Hashable, size: int) -> list[int]:
    # Not a random generator: to make one for each block would take longer than the request.
    drawn = hashlib.shake_128(f"{key} {name}".encode()).digest(4 * size)
    ids: list[int] = (FIRST_ID + np.frombuffer(drawn, dtype=np.uint32) % IDS).tolist()
    return ids
