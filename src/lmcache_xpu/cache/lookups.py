"""The look-ups of one scheduler's requests in LMCache's server; see `CacheLookUps`.

A look-up is two questions: the server begins to look, and then says what it has locked. A server
that was lost is asked nothing until it answers look-ups again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from lmcache_xpu.cache.protocol import Cache, TokenRange
from lmcache_xpu.metrics import LOAD_SERVER

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# vLLM asks again with its next step, and a look-up needs two answers of the server: a request that
# is looked up beside others would lose two of their steps. Answers for what is in memory take
# milliseconds. So a request is waited for in its first two steps, and all together in a step no
# longer than this (docs/results/server-tried.md).
PATIENCE_S = 0.004
# Where nobody else waits for a token, an idle step would follow, and the same again.
PATIENCE_ALONE_S = 0.02  # for a request
PATIENCE_ALL_ALONE_S = 0.06  # for all in a step
# Look-ups lock chunks until their requests are scheduled: in a long queue the server would have
# no room left.
MOST_UNSCHEDULED = 8
_STEPS = 2
_POLL_S = 0.0002


@dataclass(slots=True)
class _LookUp:
    tokens: TokenRange
    asked: Any  # LMCache's future of the last question
    since: float  # when that was asked
    locks: bool = False  # the first answer is there: the server looks, and locks what it has
    hit_tokens: int | None = None
    waits: int = 0  # steps in which it was waited for


class LookUps:
    """Called by the scheduler's thread."""

    def __init__(self, client: Cache) -> None:
        self._client = client
        self._lookups: dict[str, _LookUp] = {}
        self._ending: dict[str, _LookUp] = {}  # of requests that ended before they were answered
        self._said_lost = False
        self._patient_until: float | None = None  # in this step, once somebody was waited for

    def begin(self, tokens: TokenRange) -> None:
        """Ask for a request that has arrived, unless `MOST_UNSCHEDULED` others are looked up."""
        if tokens.end and self._client.healthy.is_set() and len(self._lookups) < MOST_UNSCHEDULED:
            self._asked(tokens)

    def find(self, tokens: TokenRange, *, is_alone: bool) -> int | None:
        """Return the tokens of a hit; None while the server looks. Waits a little, `PATIENCE_S`."""
        if not tokens.end:
            return 0
        if not self._client.healthy.is_set():
            self._say_lost()
            return 0
        self._said_lost = False
        lookup = self._asked(tokens)
        self._take_answers()
        if lookup.hit_tokens is not None or lookup.waits == _STEPS:
            return lookup.hit_tokens
        now = time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + (PATIENCE_ALL_ALONE_S if is_alone else PATIENCE_S)
        patient_until = min(self._patient_until, now + PATIENCE_ALONE_S)
        lookup.waits += now < patient_until
        while lookup.hit_tokens is None and time.monotonic() < patient_until:
            time.sleep(_POLL_S)
            self._take_answers()
        return lookup.hit_tokens

    def shared(self, tokens: TokenRange) -> int:
        """Return 0: LMCache's server says of a prefix only what can be hit."""
        return 0

    def forget(self, request_id: str) -> None:
        """Forget a request's look-up."""
        self._lookups.pop(request_id, None)

    def release(self, tokens: TokenRange, hit_tokens: int) -> None:
        """Let the server evict a range of a hit, whose length it knows itself."""
        if self._client.healthy.is_set() and tokens.end > tokens.start:
            key = self._client.key(tokens, worker=False)
            self._client.requests.free_lookup_locks(key, self._client.scope.tensor_parallel)

    def give_back(self, request_id: str) -> None:
        """Forget a request's look-up, and let the server evict what it has locked."""
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            self._unlock(lookup)

    def end(self, request_id: str) -> None:
        """End a request's session and unused locks, with a later step if the server still looks."""
        if (lookup := self._lookups.pop(request_id, None)) is None:
            self._end_session(request_id)
        else:
            self._ending[request_id] = lookup
            self._end_answered()

    def end_step(self) -> None:
        """End a step of vLLM: the patience of the next one is whole."""
        self._patient_until = None
        self._end_answered()

    def reset(self) -> bool:
        """Let the server give back the room of what nobody reads; whether it did. Waits."""
        try:
            self._client.requests.clear(force=False).result(timeout=self._client.timeout_s)
        except Exception as error:  # of LMCache's transport: it names none
            logger.warning(
                "LMCache's server did not empty its cache: %s (docs: troubleshooting#server-lost)",
                error,
            )
            return False
        return True

    def _asked(self, tokens: TokenRange) -> _LookUp:
        lookup = self._lookups.get(tokens.request_id)
        if lookup is None:
            key = self._client.key(tokens, worker=False)
            asked = self._client.requests.lookup(key, self._client.scope.tensor_parallel)
            lookup = self._lookups[tokens.request_id] = _LookUp(tokens, asked, time.monotonic())
        return lookup

    def _take_answers(self) -> None:
        """Take the answers that have come, of all requests; the next question of each leaves."""
        for request_id, lookup in (*self._lookups.items(), *self._ending.items()):
            if lookup.hit_tokens is not None:
                continue
            if not lookup.asked.query():
                waited_s = time.monotonic() - lookup.since
                if request_id not in self._ending and waited_s >= self._client.timeout_s:
                    self._client.healthy.clear()  # whatever heartbeats say
                    self._say_lost()
                    lookup.hit_tokens = 0
                continue
            answer = lookup.asked.result(timeout=0)
            if lookup.locks and answer is not None:
                lookup.hit_tokens = int(answer) * self._client.chunk_tokens
                continue
            lookup.locks = True  # and where the answer is None, the server still fetches
            lookup.asked = self._client.requests.query_prefetch_status(request_id)
            lookup.since = time.monotonic()

    def _end_answered(self) -> None:
        if self._ending:
            self._take_answers()
        for request_id, lookup in list(self._ending.items()):
            if lookup.hit_tokens is not None or not self._client.healthy.is_set():
                del self._ending[request_id]
                self._unlock(lookup)
                self._end_session(request_id)

    def _unlock(self, lookup: _LookUp) -> None:
        if lookup.hit_tokens:
            self.release(replace(lookup.tokens, end=lookup.hit_tokens), lookup.hit_tokens)

    def _end_session(self, request_id: str) -> None:
        if self._client.healthy.is_set():
            self._client.requests.end_session(request_id)

    def _say_lost(self) -> None:
        """Count and log that requests lack the server, once until it is there again."""
        if self._said_lost:
            return
        self._said_lost = True
        LOAD_SERVER.failed("server")
        logger.warning(
            "LMCache's server answers no look-up: prompts are computed until it does "
            "(docs: troubleshooting#server-lost)"
        )
