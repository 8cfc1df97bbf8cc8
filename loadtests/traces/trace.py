"""What a trace is: requests with a time, lengths, and the names of their blocks of tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

__all__ = ["Request", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a trace.

    Args:
        at_s: when it was sent: since the trace's start, or since its session's.
        input_tokens: of its prompt.
        output_tokens: of its answer.
        blocks: names of the prompt's blocks, in order; equal names mean equal tokens. The last
            block may be cut short. Tokens beyond the blocks are nobody else's.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole trace.

    Args:
        sessions: requests that follow each other; where the file doesn't tell, each request is
            a session of its own.
        block_tokens: that a block holds.
        timed: sessions begin at their requests' times; else when a user is free.
    """

    sessions: tuple[tuple[Request, ...], ...]
    block_tokens: int
    timed: bool

    @property
    def requests(self) -> list[Request]:
        """All requests, session by session."""
        return [request for session in self.sessions for request in session]

    def scaled(self, *, time: float, length: float) -> Self:
        """Return it with shorter gaps and shorter blocks.

        A block keeps its name and all blocks stay equally long, so that what two requests have
        in common is the same share of them.
        """
        block_tokens = max(1, round(self.block_tokens * length))

        def scale(request: Request) -> Request:
            whole, rest = divmod(request.input_tokens, self.block_tokens)
            return replace(
                request,
                at_s=request.at_s * time,
                input_tokens=max(1, whole * block_tokens + round(rest * length)),
                output_tokens=max(1, round(request.output_tokens * length)),
            )

        sessions = tuple(tuple(map(scale, session)) for session in self.sessions)
        return replace(self, sessions=sessions, block_tokens=block_tokens)

    def without_longer(self, most_tokens: int) -> Self:
        """Return it without requests of more tokens, prompt and answer together."""
        sessions = tuple(
            tuple(r for r in session if r.input_tokens + r.output_tokens <= most_tokens)
            for session in self.sessions
        )
        return replace(self, sessions=tuple(filter(None, sessions)))

    def first(self, count: int) -> Self:
        """Return its first requests, session by session."""
        rest = iter(range(count))
        sessions = tuple(
            tuple(request for request, _ in zip(session, islice(rest, len(session)), strict=False))
            for session in self.sessions
        )
        return replace(self, sessions=tuple(filter(None, sessions)))
