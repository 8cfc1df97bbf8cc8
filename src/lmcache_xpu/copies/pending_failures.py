"""Blocks that a step's loads did not fill, which is known when the device has copied all.

vLLM asks for these blocks when the step is enqueued, and looks at the answer when it has the step's
tokens. In between, what was copied is compared with what it should be. So the answer is a set that
waits when it is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from lmcache_xpu.cache.server import GivenUpError

WAIT_S = 30.0  # for a device that copies; then it counts as a load that failed


class Outcome(NamedTuple):
    """Whether a load has filled its blocks, once that is known."""

    blocks: frozenset[int]
    filled: Future[bool]

    @property
    def unfilled(self) -> frozenset[int]:
        """The blocks that were left unfilled, all or none; waits until that is known."""
        with suppress(TimeoutError):
            if self.filled.result(WAIT_S):
                return frozenset()
        return self.blocks


class PendingFailures(Set[int]):
    """The blocks that some loads left unfilled; whoever looks waits until that is known.

    It is no `set`, whose operators would look at it from C, and past this class.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes

    @classmethod
    def _from_iterable(cls, blocks: Iterable[int]) -> set[int]:  # type: ignore[override]
        return set(blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(set().union(*(outcome.unfilled for outcome in self._outcomes)))

    def __contains__(self, block: object) -> bool:
        return block in set(self)

    def __len__(self) -> int:
        return len(set(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return set, (list(self),)  # for another process


class Outcomes:
    """The outcomes of one worker's loads inside steps. Any thread decides them."""

    def __init__(self) -> None:
        self._untaken: list[Outcome] = []
        self._lock = threading.Lock()  # of the next
        self._undecided: list[Outcome] = []
        self._unfilled: set[int] = set()  # until they are given to a request anew

    @property
    def pending(self) -> bool:
        """Whether any is undecided."""
        return bool(self._undecided)

    def forget(self, written: Collection[int]) -> None:
        """Forget which blocks were left unfilled, of those that requests have got anew."""
        with self._lock:
            self._unfilled.difference_update(written)

    def expect(self, blocks: Iterable[int]) -> Outcome:
        """Return the outcome, to be decided, of a load into these blocks."""
        outcome = Outcome(frozenset(blocks), Future())
        with self._lock:
            self._undecided.append(outcome)
        self._untaken.append(outcome)
        return outcome

    def decide(self, outcome: Outcome, *, filled: bool) -> None:
        """Say whether a load has filled its blocks."""
        with self._lock:
            if not filled:
                self._unfilled |= outcome.blocks
            self._undecided.remove(outcome)
        outcome.filled.set_result(filled)

    def take(self) -> Collection[int]:
        """Return the blocks that loads left unfilled since the last call; see the module."""
        outcomes, self._untaken = self._untaken, []
        return PendingFailures(outcomes) if outcomes else set()

    def gate(self, blocks: Collection[int]) -> Callable[[], None]:
        """Return what a store, in its own thread, has to pass before it may copy.

        That waits until all loads so far are decided, and raises `GivenUpError` if one left a block
        unfilled of these: all that the request has computed from, and the store's own.
        """
        with self._lock:
            spoiled = not self._unfilled.isdisjoint(blocks)
            undecided = [o for o in self._undecided if not o.blocks.isdisjoint(blocks)]

        def check() -> None:
            if spoiled or any(outcome.unfilled for outcome in undecided):
                raise GivenUpError("unfilled")

        return check
