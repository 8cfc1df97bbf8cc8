"""The chunks of a prompt are hashed once for its look-up, and not again to load them.

The scheduler's half of LMCache hashes a prompt and asks the workers by hash. To load what was
found, a worker hashes the same tokens anew, on the engine's thread, while nothing computes yet. So
the worker keeps the hashes that it was asked for until the request is loaded or given up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

__all__ = ["ChunkHashes"]


class _Chunks(NamedTuple):
    hashes: Sequence[Any]
    sizes: Sequence[int]  # tokens


class ChunkHashes:
    """Wraps methods of one worker's LMCache engine, of 0.5's standard mode.

    Look-ups come in a thread of their own; all else in the engine's.
    """

    def __init__(self, engine: Any) -> None:
        self._asked: dict[str, _Chunks] = {}  # by request
        self._loading: ContextVar[_Chunks | None] = ContextVar("loading", default=None)
        self._pins_stay = False
        database = engine.token_database
        engine.lookup = functools.partial(self._lookup, engine.lookup)
        engine.lookup_unpin = functools.partial(self._lookup_unpin, engine.lookup_unpin)
        engine.retrieve = functools.partial(self._retrieve, engine.retrieve)
        database.process_tokens = functools.partial(self._process, database.process_tokens)

    def __len__(self) -> int:
        """Requests whose hashes are kept."""
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
        found = lookup(*args, **kwargs)
        hashes, sizes = kwargs.get("hashes"), kwargs.get("offsets")
        if found and hashes and sizes and (request := kwargs.get("lookup_id")):
            self._asked[request] = _Chunks(hashes, sizes)
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

    def _process(
        self, process: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any
    ) -> Iterable[Any]:
        """LMCache's chunks of some tokens, with keys; of a known prefix, from its hashes."""
        known, tokens = self._loading.get(), kwargs.get("tokens")
        if known is None or tokens is None:
            return process(*args, **kwargs)
        ends = list(itertools.accumulate(known.sizes))
        if len(tokens) not in ends:
            return process(*args, **kwargs)
        count = ends.index(len(tokens)) + 1
        mask = kwargs.pop("mask", None)
        skipped = 0 if mask is None else len(mask) - int(mask.sum())
        del kwargs["tokens"]
        found = process(hashes=known.hashes[:count], offsets=known.sizes[:count], **kwargs)
        return (chunk for chunk in found if chunk[0] >= skipped)
