"""The chunks of a prompt are named once for its look-up, and not again to load them.

The scheduler's half of LMCache hashes a prompt and asks the workers by hash. To load what was
found, a worker hashes the same tokens anew, on the engine's thread, while nothing computes yet. So
the worker keeps the keys that it made of the hashes until the request is loaded or given up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

__all__ = ["ChunkKeys"]


Chunk = tuple[int, int, Any]  # its first token, the one after its last, and its key


class _Asked(NamedTuple):
    chunks: list[Chunk]
    options: dict[str, Any] | None  # of the request; some are part of the keys


class ChunkKeys:
    """Wraps methods of one worker's LMCache engine, of 0.5's standard mode.

    Look-ups come in a thread of their own; all else in the engine's.
    """

    def __init__(self, engine: Any) -> None:
        self._asked: dict[str, _Asked] = {}  # by request
        self._asking: ContextVar[list[Chunk] | None] = ContextVar("asking", default=None)
        self._loading: ContextVar[_Asked | None] = ContextVar("loading", default=None)
        database = engine.token_database
        engine.lookup = functools.partial(self._lookup, engine.lookup)
        engine.lookup_unpin = functools.partial(self._lookup_unpin, engine.lookup_unpin)
        engine.retrieve = functools.partial(self._retrieve, engine.retrieve)
        database.process_tokens = functools.partial(self._process, database.process_tokens)

    def __len__(self) -> int:
        """Requests whose keys are kept."""
        return len(self._asked)

    def _lookup(self, lookup: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        chunks: list[Chunk] = []
        token = self._asking.set(chunks)
        try:
            found = lookup(*args, **kwargs)
        finally:
            self._asking.reset(token)
        if found and (request := kwargs.get("lookup_id")):
            self._asked[request] = _Asked(chunks, kwargs.get("request_configs"))
        return found

    def _lookup_unpin(self, unpin: Callable[[str], None], lookup_id: str) -> None:
        self._asked.pop(lookup_id, None)
        unpin(lookup_id)

    def _retrieve(self, retrieve: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = self._loading.set(self._asked.pop(kwargs.get("req_id", ""), None))
        try:
            return retrieve(*args, **kwargs)
        finally:
            self._loading.reset(token)

    def _process(
        self, process: Callable[..., Iterable[Chunk]], *args: Any, **kwargs: Any
    ) -> Iterable[Chunk]:
        """LMCache's chunks of some tokens; of a prefix that was looked up, those from then."""
        if (asking := self._asking.get()) is not None:
            asking.extend(process(*args, **kwargs))
            return asking
        tokens, mask = kwargs.get("tokens"), kwargs.get("mask")
        known = self._known(tokens, mask, kwargs.get("request_configs"))
        return process(*args, **kwargs) if known is None else known

    def _known(
        self, tokens: Any, mask: torch.Tensor | None, options: dict[str, Any] | None
    ) -> list[Chunk] | None:
        """Chunks of the request that is being loaded, if these tokens are a prefix of it."""
        asked = self._loading.get()
        if asked is None or tokens is None or (asked.options or None) != (options or None):
            return None
        if all(end != len(tokens) for _, end, _ in asked.chunks):
            return None
        skipped = 0 if mask is None else len(mask) - int(mask.sum())
        return [one for one in asked.chunks if one[0] >= skipped and one[1] <= len(tokens)]
