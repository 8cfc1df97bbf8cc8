"""Blocks of which is known later whether a load has filled them.

vLLM asks for the blocks that a step's loads left unfilled when the step is enqueued, and looks at
the answer when its tokens are there. Whether what was copied was still what it should be is known
in between, when the device has copied it. So the answer is a set that waits when it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import Future
from typing import Any

__all__ = ["LateBlocks", "Verdict"]

WAIT_S = 30.0  # for a device that copies; then it counts as a load that failed

Blocks = frozenset[int]


class Verdict:
    """Whether a load has filled its blocks, once that is known.

    Args:
        blocks: of the load.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self.blocks: Blocks = frozenset(blocks)
        self._unfilled: Future[Blocks] = Future()

    def give(self, *, filled: bool) -> None:
        """Say it; only the first time counts."""
        if not self._unfilled.done():
            self._unfilled.set_result(frozenset() if filled else self.blocks)

    @property
    def unfilled(self) -> Blocks:
        """The blocks that were left unfilled, all or none; waits until that is known."""
        try:
            return self._unfilled.result(WAIT_S)
        except TimeoutError:
            return self.blocks


class LateBlocks(Set[int]):
    """The blocks that some loads left unfilled; whoever looks waits until that is known.

    It is no `set`, whose operators would look at it from C, and past this class.
    """

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self._verdicts = verdicts

    @classmethod
    def _from_iterable(cls, blocks: Iterable[int]) -> set[int]:  # type: ignore[override]
        return set(blocks)

    def _known(self) -> set[int]:
        return set().union(*(verdict.unfilled for verdict in self._verdicts))

    def __contains__(self, block: object) -> bool:
        return block in self._known()

    def __iter__(self) -> Iterator[int]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __reduce__(self) -> tuple[Any, ...]:
        return set, (list(self),)  # for another process
