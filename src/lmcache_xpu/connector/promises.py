"""Loads that vLLM was promised, until the workers are told of them.

vLLM counts the tokens of a load as computed as soon as its request has blocks. Where a scheduler's
hook fails after that, workers report these blocks as those of a load that failed, and the request
is computed. LMCache is shown nothing of such a request until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

__all__ = ["NOTHING_UNSERVED", "Promises", "Unserved"]


class Unserved(NamedTuple):
    """Loads that no worker was told of. Workers report them as loads that failed.

    Args:
        blocks: block IDs of loads inside a step.
        waiting: block IDs by request, of loads that a request waits for.
    """

    blocks: frozenset[int]
    waiting: Mapping[str, frozenset[int]]

    @property
    def all_blocks(self) -> frozenset[int]:
        """Block IDs of all loads."""
        return self.blocks.union(*self.waiting.values())


NOTHING_UNSERVED = Unserved(frozenset(), {})


class _Load(NamedTuple):
    blocks: frozenset[int]
    waits: bool


class Promises:
    """The promised loads of one scheduler.

    Args:
        block_tokens: tokens of a block; None where blocks of several KV cache groups can't be told
            apart by tokens.
    """

    def __init__(self, block_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._promised: dict[str, tuple[int, bool]] = {}  # kept tokens, and whether it waits
        self._loads: dict[str, _Load] = {}  # of the next step, by request
        self._failed: dict[str, _Load] = {}
        self._broken: set[str] = set()

    @property
    def broken(self) -> Set[str]:
        """IDs of requests of which LMCache is shown nothing."""
        return self._broken

    def promise(self, request_id: str, kept: int, *, waits: bool) -> None:
        """Record that a request's look-up has promised tokens.

        Args:
            request_id: ID of the request.
            kept: number of tokens in vLLM's own prefix cache.
            waits: the request waits for its load.
        """
        self._promised[request_id] = kept, waits

    def allocated(self, request_id: str, blocks: Sequence[int], tokens: int) -> None:
        """Record that a request has blocks for its load.

        Args:
            request_id: ID of the request.
            blocks: IDs of all its blocks.
            tokens: number of tokens to load; 0 if nothing is loaded.
        """
        kept, waits = self._promised.pop(request_id, (0, False))
        if tokens:
            size = self._block_tokens
            end = 0 if size is None else -(-(kept + tokens) // size)
            first = 0 if size is None else kept // size
            self._loads[request_id] = _Load(frozenset(blocks[first:end]), waits)

    def describe(self) -> Unserved:
        """End a step's description: return its failed loads. Workers are told of the others."""
        failed, self._failed = self._failed, {}
        self._loads.clear()
        if not failed:
            return NOTHING_UNSERVED
        return Unserved(
            frozenset().union(*(load.blocks for load in failed.values() if not load.waits)),
            {name: load.blocks for name, load in failed.items() if load.waits},
        )

    def fail(self, request_ids: Iterable[str]) -> None:
        """Give these requests up: a hook failed for them."""
        for name in request_ids:
            self._broken.add(name)
            if (load := self._loads.pop(name, None)) is not None:
                self._failed[name] = load

    def fail_step(self, request_ids: Iterable[str]) -> None:
        """Give a step up: all its requests, and all that were to begin waiting for their loads."""
        self.fail([*request_ids, *self._loads])

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._promised.pop(request_id, None)
        self._broken.discard(request_id)
