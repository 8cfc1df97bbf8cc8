"""The chunks of a prompt are named once for its look-up, and not again to load them.

The scheduler's half of LMCache hashes a prompt and asks the workers by hash. To load what was
found, a worker hashes the same tokens anew, on the engine's thread, while nothing computes yet. So
the worker keeps the keys that it made of the hashes until the request is loaded or given up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
        self._pins_stay = False
        self._engine = engine
        database = engine.token_database
        engine.lookup = functools.partial(self._lookup, engine.lookup)
        engine.lookup_unpin = functools.partial(self._lookup_unpin, engine.lookup_unpin)
        engine.retrieve = functools.partial(self._retrieve, engine.retrieve)
        engine._process_tokens_internal = functools.partial(
            self._memory, engine._process_tokens_internal
        )
        database.process_tokens = functools.partial(self._process, database.process_tokens)

    def __len__(self) -> int:
        """Requests whose keys are kept."""
        return len(self._asked)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Loads in here leave their chunks pinned, for the end of the step to unpin.

        LMCache does both, and the first one takes the engine's thread a fifth of a millisecond
        for 64 chunks. Copies that are under way hold what is pinned longer than it needs to be.
        """
        self._pins_stay = True
        try:
            yield
        finally:
            self._pins_stay = False

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
        if not self._pins_stay:
            unpin(lookup_id)

    def _retrieve(self, retrieve: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = self._loading.set(self._asked.pop(kwargs.get("req_id", ""), None))
        try:
            return retrieve(*args, **kwargs)
        finally:
            self._loading.reset(token)

    def _memory(
        self,
        collect: Callable[..., Any],
        tokens: Any,
        mask: torch.Tensor | None,
        found: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """LMCache's chunks of a load, each with its memory, and their bytes.

        Of a prefix that one tier has promised, all at once: LMCache's loop marks what it found
        with an operation of torch per chunk.
        """
        tiers = self._engine.lookup_pins.get(kwargs.get("req_id"), ())
        chunks = self._known(tokens, mask, kwargs.get("request_configs"))
        if chunks and len(tiers) == 1:
            keys = [key for _, _, key in chunks]
            memory = self._engine.storage_manager.batched_get(keys=keys, location=next(iter(tiers)))
            if None not in memory:
                found[chunks[0][0] : chunks[-1][1]] = True
                spans = zip(chunks, memory, strict=True)
                parts = [(key, obj, start, end) for (start, end, key), obj in spans]
                return parts, sum(obj.get_size() for obj in memory)
            for obj in memory:  # taken away since; LMCache deals with that
                if obj is not None:
                    obj.ref_count_down()
        return collect(tokens, mask, found, **kwargs)

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
