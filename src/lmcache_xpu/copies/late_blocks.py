"""Blocks of which is known later whether a load has filled them.

vLLM asks for the blocks that a step's loads left unfilled when the step is enqueued, and looks at
the answer when its tokens are there. Whether what was copied was still what it should be is known
in between, when the device has copied it. So the answer is a set that waits when it is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future
from typing import Any

from lmcache_xpu.cache.server import GivenUpError

__all__ = ["LateBlocks", "Verdict", "Verdicts"]

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


class Verdicts:
    """The verdicts of one worker's loads. They are given by any thread."""

    def __init__(self) -> None:
        self._untaken: list[Verdict] = []
        self._lock = threading.Lock()  # of the next
        self._unknown: list[Verdict] = []
        self._unfilled: set[int] = set()  # until they are given to a request anew

    @property
    def awaited(self) -> bool:
        """Whether any has not been given."""
        with self._lock:
            return bool(self._unknown)

    def forget(self, written: Collection[int]) -> None:
        """Forget what was left unfilled of blocks that requests have got anew."""
        with self._lock:
            self._unfilled.difference_update(written)

    def expect(self, blocks: Iterable[int]) -> Verdict:
        """Return the verdict of a load that has been asked for, into these blocks."""
        verdict = Verdict(blocks)
        with self._lock:
            self._unknown.append(verdict)
        self._untaken.append(verdict)
        return verdict

    def give(self, verdict: Verdict, *, filled: bool) -> None:
        """Say whether a load has filled its blocks."""
        with self._lock:
            if not filled:
                self._unfilled |= verdict.blocks
            self._unknown.remove(verdict)
        verdict.give(filled=filled)

    def take(self) -> Collection[int]:
        """Return the blocks that loads left unfilled since the last call."""
        verdicts, self._untaken = self._untaken, []
        return LateBlocks(verdicts) if verdicts else set()

    def gate(self, blocks: Collection[int]) -> Callable[[], None]:
        """Return what a store has to pass, in its own thread, before it may copy.

        It waits until it is known of all loads so far whether they have filled their blocks, and
        raises `GivenUpError` if one left a block unfilled.

        Args:
            blocks: all that the store's request has computed from, and the store's own.
        """
        with self._lock:
            spoiled = not self._unfilled.isdisjoint(blocks)
            unknown = [v for v in self._unknown if not v.blocks.isdisjoint(blocks)]

        def check() -> None:
            if spoiled or any(verdict.unfilled for verdict in unknown):
                raise GivenUpError("unfilled")

        return check
