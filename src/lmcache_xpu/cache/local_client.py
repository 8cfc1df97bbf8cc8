"""One half of the connector at a cache in this process: what `ServerClient` is at a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_xpu.cache.local_cache import LocalCache
from lmcache_xpu.cache.protocol import KeyScope, ReadPolicy, TokenRange
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU


class LocalClient:
    """Asks a cache that always answers; see `Cache`."""

    load_flow, store_flow = LOAD_CPU, STORE_CPU
    requests: Any = None
    instance_id: int | None = 0
    timeout_s = 1.0

    def __init__(self, local: LocalCache, scope: KeyScope) -> None:
        self.local, self.scope = local, scope
        self.chunk_tokens = local.chunk_tokens
        self.healthy = threading.Event()
        self.healthy.set()
        self._is_closed = False

    def key(self, tokens: TokenRange, *, worker: bool) -> TokenRange:
        """Return the range, which `LocalCache` takes."""
        return tokens

    def lookups(self, policy: ReadPolicy) -> LocalLookUps:
        """Return the look-ups of a scheduler."""
        return LocalLookUps(self.local, policy)

    def places(self, sizes: Sequence[int], windows: Sequence[int], timeout_s: float) -> LocalCache:
        """Return the cache, which learns what is stored."""
        self.local.register(sizes, windows)
        return self.local

    def start_heartbeat(self, *_: object) -> None:
        """Do nothing: a cache in this process lives as long as this does."""

    def stop_heartbeat(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End this half's use of the cache; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self.local.close()


class LocalLookUps:
    """The look-ups of one scheduler's requests in a cache of this process; see `CacheLookUps`.

    Memory answers at once. Where it lacks chunks, other tiers are read into it if that is faster
    than computing, and the request is asked for again.
    """

    def __init__(self, local: LocalCache, policy: ReadPolicy) -> None:
        self._local, self._policy = local, policy
        self._lookups: dict[str, _LookUp] = {}
        self._ending: list[_LookUp] = []  # of requests that ended before they were answered

    def begin(self, tokens: TokenRange) -> None:
        """Let other tiers be read for a request that has arrived."""
        if tokens.end and self._local.has_other_tiers:
            self._asked(tokens)

    def find(self, tokens: TokenRange, *, is_alone: bool) -> int | None:
        """Return the tokens of a request's hit; None while other tiers are read."""
        if not tokens.end:
            return 0
        hit = self._asked(tokens).hit
        return None if hit is None else hit * self._local.chunk_tokens

    def shared(self, tokens: TokenRange) -> int:
        """Return the tokens of a prefix that memory has of all layers of whole attention."""
        size = self._local.chunk_tokens
        return self._local.attention_chunks(tokens.tokens, tokens.end // size) * size

    def forget(self, request_id: str) -> None:
        """Forget a request's look-up, whose chunks others unlock."""
        self._lookups.pop(request_id, None)

    def release(self, tokens: TokenRange, hit_tokens: int) -> None:
        """Unlock a range of chunks of a hit."""
        size = self._local.chunk_tokens
        chunks = hit_tokens // size, tokens.start // size, tokens.end // size
        self._local.unlock(tokens.tokens, *chunks)

    def give_back(self, request_id: str) -> None:
        """Forget a request's look-up, and unlock its chunks."""
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            self._end(lookup)

    end = give_back

    def end_step(self) -> None:
        """Unlock what was found for requests that have ended."""
        ending, self._ending = self._ending, []
        for lookup in ending:
            self._end(lookup)

    def reset(self) -> bool:
        """Remove all that was stored; whether nothing is left."""
        return self._local.reset()

    def _end(self, lookup: _LookUp) -> None:
        if (hit := self._answered(lookup)) is None:
            self._ending.append(lookup)
        elif hit:
            self._local.unlock(lookup.tokens.tokens, hit, 0, hit)

    def _asked(self, tokens: TokenRange) -> _LookUp:
        lookup, local = self._lookups.get(tokens.request_id), self._local
        if lookup is None:
            chunks = tokens.end // local.chunk_tokens
            lookup = _LookUp(tokens, local.find(tokens.tokens, chunks, in_memory=True))
            self._lookups[tokens.request_id] = lookup
            hit = self._answered(lookup)
            lacks = 0 if hit is None else (chunks - hit) * local.chunk_tokens
            if hit is not None and lacks and local.has_other_tiers and self._policy.reads(lacks):
                local.unlock(tokens.tokens, hit, 0, hit)
                lookup.read_since, lookup.in_memory = time.monotonic(), hit
                lookup.handle = local.find(tokens.tokens, chunks, in_memory=False)
                lookup.hit = None
        self._answered(lookup)
        return lookup

    def _answered(self, lookup: _LookUp) -> int | None:
        if lookup.hit is None:
            lookup.hit = self._local.hit_chunks(lookup.handle)
            if lookup.read_since and lookup.hit is None:
                lookup.read_s = time.monotonic() - lookup.read_since
            elif lookup.read_since and lookup.hit and lookup.hit > lookup.in_memory:
                tokens = (lookup.hit - lookup.in_memory) * self._local.chunk_tokens
                self._policy.was_read(tokens, lookup.read_s)
        return lookup.hit


@dataclass(slots=True)
class _LookUp:
    tokens: TokenRange
    handle: Any  # LMCache's, of the look-up
    hit: int | None = None  # chunks
    in_memory: int = 0  # chunks, before other tiers were read
    read_since: float | None = None  # by the monotonic clock
    # Until it was last asked for and not read yet. A request in a queue is not asked for, and what
    # was read meanwhile has cost it nothing.
    read_s: float = 0.0
