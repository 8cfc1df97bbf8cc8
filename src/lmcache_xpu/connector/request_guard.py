"""Nothing that a client sends ends the engine, which serves the others as well.

An error in a hook of vLLM turns one request into a miss. vLLM counts the tokens of a load as
computed as soon as its request has blocks. Where a scheduler's hook fails after that, workers
report these blocks as those of a load that failed, and the request is computed. LMCache is shown
nothing of such a request until it ends.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lmcache_xpu.metrics import fallback

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


@contextmanager
def guarded(hook: str) -> Iterator[None]:
    """Turn an error in a hook of vLLM into a miss: it is counted, and logged once for each kind."""
    try:
        yield
    except Exception as error:  # whatever a request's content does to who reads it
        fallback("request")
        _log(hook, type(error).__name__, str(error))


@functools.lru_cache(maxsize=256)
def _log(hook: str, kind: str, text: str) -> None:
    logger.exception(
        "a request is computed, as %s failed for it: %s: %s (docs: troubleshooting#request-failed)",
        hook,
        kind,
        text,
    )


class Unserved(NamedTuple):
    """Promised loads that no worker knows. Workers report them as loads that failed."""

    blocks: frozenset[int]  # IDs, of loads inside a step
    waiting: Mapping[str, frozenset[int]]  # by request, of loads that it waits for


NOTHING_UNSERVED = Unserved(frozenset(), {})


class _Load(NamedTuple):
    blocks: frozenset[int]
    waits: bool


class Promises:
    """The loads that one scheduler has promised to vLLM, until a step describes them to workers."""

    def __init__(self, block_tokens: int | None) -> None:
        self.broken: set[str] = set()  # requests of which LMCache is shown nothing
        # Of the KV cache group that keeps all of a prompt; None where none does.
        self._block_tokens = block_tokens
        self._promised: dict[str, tuple[int, bool]] = {}  # kept tokens, and whether it waits
        self._loads: dict[str, _Load] = {}  # of the next step, by request
        self._failed: dict[str, _Load] = {}

    def promise(self, request_id: str, kept: int, *, waits: bool) -> None:
        """Record a load of what lies behind the `kept` tokens of vLLM's own prefix cache."""
        self._promised[request_id] = kept, waits

    def allocated(self, request_id: str, blocks: Sequence[int], tokens: int) -> None:
        """Record the IDs of that group's blocks of a request, which loads so many tokens or 0."""
        kept, waits = self._promised.pop(request_id, (0, False))
        if tokens:
            size = self._block_tokens
            first, end = (0, 0) if size is None else (kept // size, -(-(kept + tokens) // size))
            self._loads[request_id] = _Load(frozenset(blocks[first:end]), waits)

    def describe(self) -> Unserved:
        """End a step's description: return its failed loads. Workers know the others."""
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
            self.broken.add(name)
            if (load := self._loads.pop(name, None)) is not None:
                self._failed[name] = load

    def fail_step(self, request_ids: Iterable[str]) -> None:
        """Give a step up: all its requests, and all that were to begin waiting for their loads."""
        self.fail([*request_ids, *self._loads])

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._promised.pop(request_id, None)
        self.broken.discard(request_id)
