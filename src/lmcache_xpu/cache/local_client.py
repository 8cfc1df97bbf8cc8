"""One half of the connector at a cache in this process: what `ServerClient` is at a server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache_xpu.cache.local_cache import LocalCache, Range
from lmcache_xpu.cache.object_slots import ObjectSlots
from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.room import Rows
from lmcache_xpu.cache.server_client import KeyScope
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU

__all__ = ["Answer", "LocalClient", "LocalLookUps", "LocalQuestions"]


class LocalClient:
    """Asks a cache that always answers.

    Args:
        local: the cache.
        scope: what keys hold of the engine.

    Attributes:
        chunk_tokens: tokens of a chunk.
        healthy: always set.
    """

    load_flow, store_flow = LOAD_CPU, STORE_CPU
    requests: Any = None  # to a server
    instance_id, timeout_s = 0, 1.0

    def __init__(self, local: LocalCache, scope: KeyScope) -> None:
        self.local, self.scope = local, scope
        self.chunk_tokens = local.chunk_tokens
        self.healthy = threading.Event()
        self.healthy.set()
        self._is_closed = False

    def key(self, tokens: TokenRange, *, worker: bool) -> Key:
        """Return the key of a range of tokens, which `LocalQuestions` takes."""
        return Key(tokens.start, tokens.end, self._chunks(tokens))

    def answers_lookups(self, timeout_s: float) -> bool:
        """Whether look-ups are answered: they are."""
        return True

    def start_heartbeat(self, *_: object) -> None:
        """Do nothing: a cache in this process lives as long as this does."""

    def stop_heartbeat(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End this half's use of the cache; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self.local.close()

    def _chunks(self, tokens: TokenRange) -> Range:
        size = self.chunk_tokens
        return Range(tokens.tokens, tokens.start // size, tokens.end // size)


class Key(NamedTuple):
    """A range of tokens, and its chunks."""

    start: int
    end: int
    chunks: Range


class Answer:
    """What a cache in this process answers: it is there at once.

    Args:
        value: the answer.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is there."""
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Return it."""
        return self._value


class LocalQuestions:
    """Where chunks are, or may be stored, in a cache of this process; see `LoadQuestions`.

    Args:
        local: the cache.
    """

    is_sealed = False  # nobody else writes there

    def __init__(self, local: LocalCache, groups: int) -> None:
        self._local, self._groups = local, groups

    def ask(self, number: int, key: Key) -> Answer:
        """Return where the chunks of a key are."""
        return Answer(self._local.locate(number, key.chunks))

    def slots(self, answer: Rows | None) -> ObjectSlots | None:
        """Return what an answer names; None if a chunk is missing."""
        return None if answer is None else self.reserved(answer)

    def end(self, number: int, key: Key) -> None:
        """Unlock what a question has named."""
        self._local.release(number)

    def reserve(self, number: int, key: Key, skipped: Sequence[Sequence[int]]) -> Answer:
        """Return where to store the chunks of a key, but by group those that the worker lacks."""
        return Answer(self._local.reserve(number, key.chunks, skipped))

    def reserved(self, answer: Rows) -> ObjectSlots:
        """Return what an answer names."""
        return ObjectSlots.of_rows(answer, self._groups)

    def commit(self, number: int, key: Key) -> Answer:
        """Publish what a question has named."""
        return Answer(self._local.commit(number))

    def give_up(self, number: int) -> None:
        """Forget what a question has named."""
        self._local.give_up(number)

    def is_committed(self, answer: bool) -> bool:
        """Whether that was still reserved."""
        return answer


class LocalLookUps:
    """The look-ups of one scheduler's requests in a cache of this process; see `LookUps`.

    Memory answers at once. Where it lacks chunks, other tiers are read into it, and the request is
    asked for again.

    Args:
        local: the cache.
    """

    def __init__(self, local: LocalCache) -> None:
        self._local = local
        self._lookups: dict[str, _LookUp] = {}
        self._ending: list[_LookUp] = []  # of requests that ended before they were answered

    def begin(self, tokens: TokenRange) -> None:
        """Let other tiers be read for a request that has arrived."""
        if tokens.end and self._local.has_other_tiers:
            self._asked(tokens)

    def hit_tokens(self, tokens: TokenRange, *, is_alone: bool) -> int | None:
        """Return the tokens of a request's hit; None while other tiers are read."""
        if not tokens.end:
            return 0
        lookup = self._asked(tokens)
        return None if lookup.hit is None else lookup.hit * self._local.chunk_tokens

    def end_step(self) -> None:
        """Unlock what was found for requests that have ended."""
        ending, self._ending = self._ending, []
        for lookup in ending:
            self._end(lookup)

    def forget(self, request_id: str) -> None:
        """Forget a request's look-up, whose locks others give back."""
        self._lookups.pop(request_id, None)

    def give_back(self, request_id: str) -> None:
        """Forget a request's look-up, and unlock what it has locked."""
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            self._end(lookup)

    end = give_back

    def release(self, tokens: TokenRange, hit_tokens: int) -> None:
        """Unlock a range of chunks of a hit."""
        size = self._local.chunk_tokens
        self._local.unlock(
            tokens.tokens, hit_tokens // size, tokens.start // size, tokens.end // size
        )

    def clear(self) -> bool:
        """Remove all that was stored; whether nothing is left."""
        return self._local.forget()

    def _end(self, lookup: _LookUp) -> None:
        if (hit := self._answered(lookup)) is None:
            self._ending.append(lookup)
        elif hit:
            self._local.unlock(lookup.tokens.tokens, hit, 0, hit)

    def _asked(self, tokens: TokenRange) -> _LookUp:
        lookup = self._lookups.get(tokens.request_id)
        if lookup is None:
            chunks = tokens.end // self._local.chunk_tokens
            lookup = _LookUp(tokens, self._local.find(tokens.tokens, chunks, in_memory=True))
            self._lookups[tokens.request_id] = lookup
            hit = self._answered(lookup)
            if hit is not None and hit < chunks and self._local.has_other_tiers:
                self._local.unlock(tokens.tokens, hit, 0, hit)
                lookup.handle, lookup.hit = (
                    self._local.find(tokens.tokens, chunks, in_memory=False),
                    None,
                )
        self._answered(lookup)
        return lookup

    def _answered(self, lookup: _LookUp) -> int | None:
        if lookup.hit is None:
            lookup.hit = self._local.hit_chunks(lookup.handle)
        return lookup.hit


class _LookUp:
    def __init__(self, tokens: TokenRange, handle: Any) -> None:
        self.tokens, self.handle = tokens, handle
        self.hit: int | None = None
