"""What was stored before a reset, or under other weights, is never found again.

Weights that change in a running engine leave the keys of its KV as they were. So each reset begins
an epoch: its name, drawn at random, is part of what sets a request's KV apart (see `cache_salt`),
and so of every key, in every tier and on every rank. The first epoch has no name: its keys are
those of all engines with these weights, before and after a restart.

A request belongs to the epoch in which it last began from nothing. One that was running when an
epoch began has KV of both sides of it, and gets a name of its own: it finds and stores nothing
until vLLM preempts it.

Weights may change without a reset. A worker learns of that (see `worker_hooks`), and looks up,
loads and stores nothing until the scheduler, which it tells, has begun another epoch.

    scheduler   Epochs        which epoch it is, and whose a request's KV is
    worker      WorkerEpoch   which epoch it has heard of, and whether its weights outlived it
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

__all__ = ["FIRST", "Epoch", "Epochs", "WeightsChanged", "WorkerEpoch"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class Epoch(NamedTuple):
    """A time in which all KV of an engine is of one kind.

    Args:
        number: counted by the scheduler.
        name: part of every key; empty for the first.
    """

    number: int
    name: str


FIRST = Epoch(0, "")


class WeightsChanged(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """A worker tells the scheduler that its weights changed.

    Args:
        number: of the last epoch that the worker had heard of.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WeightsChanged:
        """What several workers said, as one."""
        assert isinstance(other, WeightsChanged)
        return WeightsChanged(max(self.number, other.number))


class Step(Protocol):
    """What the workers are told of a step, as far as it is looked at here."""

    requests: list[Any]
    epoch: Epoch


class BlockPool(Protocol):
    """vLLM's blocks, as far as they are looked at here."""

    num_gpu_blocks: int
    cached_block_hash_to_block: Any

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds."""


class Epochs:
    """The scheduler's half: the epoch of each request."""

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

    def describe(self, metadata: Step) -> None:
        """Tell the workers of the epoch with a step, and what of it is not to be stored."""
        metadata.epoch = self.current
        for request in metadata.requests:
            if request.save_spec is not None and not self.is_only(request.req_id):
                request.save_spec.can_save = False

    def _pool_is_empty(self) -> bool:
        """Whether vLLM holds no KV at all; one of its blocks is never used."""
        pool = self.pool
        if pool is None or len(pool.cached_block_hash_to_block):
            return False
        return pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1


class LookUps(Protocol):
    """LMCache's engine, as far as it is told of here."""

    refuses_lookups: bool


class Refusal(Protocol):
    """Keeps a step from loading and storing."""

    def refuse(self, requests: list[Any]) -> None:
        """Report the loads of a step as failed, and leave out its stores."""


class WorkerEpoch:
    """The worker's half. Called by the engine's thread.

    Args:
        engine: LMCache's, whose look-ups find nothing while the weights are other ones.
        loads: keeps a step from loading and storing.
        forget: gives back the room of what was stored; whether that succeeded.
    """

    def __init__(self, engine: LookUps, loads: Refusal, forget: Callable[[], bool]) -> None:
        self._engine = engine
        self._loads = loads
        self._forget = forget
        self._current = FIRST
        self._changed_in = -1  # number of an epoch

    @property
    def changed(self) -> WeightsChanged | None:
        """Whether the weights have changed since this epoch was heard of."""
        number = self._current.number
        return WeightsChanged(number) if self._changed_in >= number else None

    def change_weights(self) -> None:
        """The weights are about to change, or may have."""
        self._changed_in = self._current.number
        self._engine.refuses_lookups = True

    def begin(self, epoch: Epoch) -> bool:
        """Give back the room of what was stored before this epoch, if it is another one.

        Returns:
            False if something of it is still there. It will not be found in this process.
        """
        if epoch.number <= self._current.number:
            return True
        self._current = epoch
        self._engine.refuses_lookups = False
        return self._forgotten()

    def begin_step(self, metadata: Step) -> None:
        """Load and store nothing of a step that was described in an epoch that has passed."""
        self.begin(metadata.epoch)
        if self.changed is not None:
            self._loads.refuse(metadata.requests)

    def end(self) -> None:
        """The engine ends. What has a name of this process's own will never be found again."""
        if self._current != FIRST:
            self._forgotten()

    def _forgotten(self) -> bool:
        try:
            return self._forget()
        except Exception:  # whatever it is: it is not found, and the engine goes on
            logger.exception(
                "lmcache-xpu could not give back the room of an earlier epoch "
                "(docs: troubleshooting#epoch-room)"
            )
            return False
