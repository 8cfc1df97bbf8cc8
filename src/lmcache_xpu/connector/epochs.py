"""What was stored before a reset, or under other weights, is never found again.

Weights that change in a running engine leave the keys of its KV as they were. So each reset begins
an epoch: its name, drawn at random, is part of what sets a request's KV apart (see `cache_salt`),
and so of every key, in every tier and on every rank. The first epoch has no name: its keys are
those of all engines with these weights, before and after a restart.

A request belongs to the epoch in which it last began from nothing. One that was running when an
epoch began has KV of both sides of it, and gets a name of its own: it finds and stores nothing
until vLLM preempts it.

"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, Protocol

__all__ = ["FIRST", "Epoch", "Epochs"]


class Epoch(NamedTuple):
    """A time in which all KV of an engine is of one kind.

    Args:
        number: counted by the scheduler.
        name: part of every key; empty for the first.
    """

    number: int
    name: str


FIRST = Epoch(0, "")


class BlockPool(Protocol):
    """vLLM's blocks, as far as they are looked at here."""

    num_gpu_blocks: int
    cached_block_hash_to_block: Any

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds."""


class Epochs:
    """The epoch of each request of one scheduler."""

    def __init__(self) -> None:
        self.current = FIRST
        self.pool: BlockPool | None = None  # vLLM's; from soon after the start
        self._names: dict[str, str] = {}  # of requests
        self._mixed = False  # vLLM's own prefix cache may hold blocks of an earlier epoch

    def begin(self) -> None:
        """Begin an epoch. Requests that are alive find and store nothing until they begin anew."""
        self.current = Epoch(self.current.number + 1, uuid.uuid4().hex)
        self._names = {request: uuid.uuid4().hex for request in self._names}
        self._mixed = not self._pool_is_empty()

    def admit(self, request: str, kept: int) -> None:
        """A request begins from nothing, or from what vLLM's own prefix cache has of it.

        Args:
            request: name of the request.
            kept: tokens that vLLM's own prefix cache has.
        """
        mixed = self.is_mixed and kept > 0
        self._names[request] = uuid.uuid4().hex if mixed else self.current.name

    @property
    def is_mixed(self) -> bool:
        """Whether vLLM's own prefix cache may hold blocks of an earlier epoch."""
        self._mixed = self._mixed and not self._pool_is_empty()
        return self._mixed

    def of(self, request: str) -> str:
        """What a request's keys have of its epoch; empty in the first."""
        return self._names.get(request, self.current.name)

    def is_only(self, request: str) -> bool:
        """Whether a request's KV is of the current epoch alone, so that it may be stored."""
        return self._names.get(request, FIRST.name) == self.current.name

    def finished(self, request: str) -> None:
        """Forget a request."""
        self._names.pop(request, None)

    def _pool_is_empty(self) -> bool:
        """Whether vLLM holds no KV at all; one of its blocks is never used."""
        pool = self.pool
        if pool is None or len(pool.cached_block_hash_to_block):
            return False
        return pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
