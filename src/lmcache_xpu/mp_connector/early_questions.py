"""Questions of a step's loads that are asked before it, by a scheduler in the worker's process.

    name   while the server looks a request up: all that a question needs, but its range
    ask    the request has a hit: where its chunks are
    take   its step has begun
    end    what no step took is given back

What fails here is left to the step, which asks for it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from lmcache_xpu.mp_connector.load_questions import Question
from lmcache_xpu.mp_connector.moves import Moves
from lmcache_xpu.mp_connector.seals import Seals

__all__ = ["EarlyQuestions", "SealedQuestion", "ask_at_once"]

# LMCache's thread sends a question. Python lets it run when this one waits, or else after 5 ms.
SENT_S = 0.0003


class SealedQuestion(NamedTuple):
    """A question, and the seals that its chunks should have."""

    asked: Question
    seals: Seals


class EarlyQuestions:
    """The questions of one worker. Called by the engine's thread; no call raises.

    Args:
        moves: of the worker.
    """

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._named: dict[str, tuple[Any, Seals]] = {}  # by request
        self._asked: dict[str, SealedQuestion] = {}

    def name(self, request_id: str, key: Callable[[], Any]) -> None:
        """Name a request's chunks, once.

        Args:
            request_id: name of the request.
            key: makes LMCache's, of all chunks that it may have, from its first token on.
        """
        if request_id in self._named:
            return
        with suppress(Exception):  # whatever: its step names them again, and fails there
            named = key()
            self._named[request_id] = named, self._moves.seals(named)

    def ask(self, request_id: str, start: int, end: int) -> None:
        """Ask where the chunks of a request are that was named, once.

        Args:
            request_id: name of the request.
            start: first token of the chunks.
            end: the one after the last.
        """
        if request_id in self._asked or request_id not in self._named:
            return
        key, seals = self._named[request_id]
        size = self._moves.chunk_tokens
        chunks = slice(start // size, end // size)
        with suppress(Exception):  # whatever: it is asked again, and fails there
            asked = ask_at_once(self._moves, dataclasses.replace(key, start=start, end=end))
            self._asked[request_id] = SealedQuestion(asked, [group[chunks] for group in seals])

    def take(self, request_id: str) -> SealedQuestion | None:
        """Return what was asked for a request, and forget it; None if nothing was."""
        return self._asked.pop(request_id, None)

    def end(self) -> None:
        """End questions whose requests are not in the step after all."""
        for question in self._asked.values():
            self._moves.end_load(question.asked)
        self._asked.clear()
        self._named.clear()


def ask_at_once(moves: Moves, key: Any) -> Question:
    """Ask where chunks are, and let the question leave; errors as `Moves.ask_for_load`."""
    asked = moves.ask_for_load(key)
    asked.is_answered(SENT_S)
    return asked
