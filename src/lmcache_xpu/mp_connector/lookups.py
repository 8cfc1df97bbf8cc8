"""The look-ups of one scheduler's requests in LMCache's server.

    hit_tokens  the request is asked for, and again with each of vLLM's steps until it is answered
    forget      its request has blocks, or is looked up anew
    release     the server need not keep chunks that nobody will load
    end         the request has ended; so does the server's session

A server that was lost is asked nothing until it answers look-ups again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from lmcache_xpu.metrics import LOAD_SERVER
from lmcache_xpu.mp_connector.server_client import ServerClient
from lmcache_xpu.mp_connector.step import TokenRange

__all__ = ["LookUps"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# vLLM asks again with its next step, and a look-up needs two answers of the server: a request that
# is looked up beside others would lose two of their steps. Answers for what is in memory take
# milliseconds. So a request is waited for in its first two steps, and all together in a step no
# longer than this (docs/results/server-tried.md).
PATIENCE_S = 0.004
# Where nobody else waits for a token, an idle step would follow, and the same again.
PATIENCE_ALONE_S = 0.02  # for a request
PATIENCE_ALL_ALONE_S = 0.06  # for all in a step
_STEPS = 2
_POLL_S = 0.0002


@dataclass(slots=True)
class _LookUp:
    asked: Any  # LMCache's future of the question under way
    since: float  # when that was asked
    locks: bool = False  # the first answer is there: the server looks, and locks what it has
    hit_tokens: int | None = None
    waits: int = 0  # steps in which it was waited for


class LookUps:
    """Called by the scheduler's thread.

    Args:
        client: of the server.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._lookups: dict[str, _LookUp] = {}
        self._ending: dict[str, _LookUp] = {}  # of requests that ended before they were answered
        self._said_lost = False
        self._patient_until: float | None = None  # in this step, once somebody was waited for

    def end_step(self) -> None:
        """End a step of vLLM: the patience of the next one is whole."""
        self._patient_until = None
        for request_id, lookup in list(self._ending.items()):
            if lookup.asked.query() or not self._client.healthy.is_set():
                del self._ending[request_id]
                self._end_session(request_id)

    def hit_tokens(self, tokens: TokenRange, *, is_alone: bool) -> int | None:
        """Return the tokens of a request's hit; None while the server looks.

        Waits a little for what is in memory, see `PATIENCE_S`. A disk takes longer.

        Args:
            tokens: whole chunks of the request, from its first token on.
            is_alone: nobody else waits for a token.
        """
        if not tokens.end:
            return 0
        if not self._client.healthy.is_set():
            self._say_lost()
            return 0
        self._said_lost = False
        lookup = self._lookups.get(tokens.request_id)
        if lookup is None:
            key = self._client.key(tokens, worker=False)
            asked = self._client.requests.lookup(key, self._client.scope.tensor_parallel)
            lookup = self._lookups[tokens.request_id] = _LookUp(asked, time.monotonic())
        if self._is_answered(tokens.request_id, lookup) or lookup.waits == _STEPS:
            return lookup.hit_tokens
        now = time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + (PATIENCE_ALL_ALONE_S if is_alone else PATIENCE_S)
        patient_until = min(self._patient_until, now + PATIENCE_ALONE_S)
        lookup.waits += now < patient_until
        while time.monotonic() < patient_until:
            time.sleep(_POLL_S)
            if self._is_answered(tokens.request_id, lookup):
                break
        return lookup.hit_tokens

    def forget(self, request_id: str) -> None:
        """Forget a request's look-up."""
        self._lookups.pop(request_id, None)

    def release(self, tokens: TokenRange) -> None:
        """Let the server evict chunks that a look-up has locked."""
        if self._client.healthy.is_set() and tokens.end > tokens.start:
            key = self._client.key(tokens, worker=False)
            self._client.requests.free_lookup_locks(key, self._client.scope.tensor_parallel)

    def end(self, request_id: str) -> None:
        """End the server's session of a request, once no question of it is under way."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is None or lookup.asked.query():
            self._end_session(request_id)
        else:
            self._ending[request_id] = lookup

    def clear(self) -> bool:
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

    def _is_answered(self, request_id: str, lookup: _LookUp) -> bool:
        """Take answers that have come; whether the hit is clear."""
        while lookup.hit_tokens is None:
            if not lookup.asked.query():
                if time.monotonic() - lookup.since < self._client.timeout_s:
                    return False
                self._client.doubt()
                self._say_lost()
                lookup.hit_tokens = 0
                return True
            answer = lookup.asked.result(timeout=0)
            if lookup.locks and answer is not None:
                lookup.hit_tokens = int(answer) * self._client.chunk_tokens
                return True
            waits_for_status = lookup.locks
            lookup.locks = True
            lookup.asked = self._client.requests.query_prefetch_status(request_id)
            lookup.since = time.monotonic()
            if waits_for_status:  # the server still fetches; ask no faster than it answers
                return False
        return True

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
