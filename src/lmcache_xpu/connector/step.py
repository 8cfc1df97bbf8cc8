"""What the scheduler's half tells the workers of a step, and what they report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.connector.promises import NOTHING_UNSERVED, Unserved
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["Step", "WorkerReport", "written_blocks"]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # untyped base
    """What the workers are told of a step.

    Args:
        written: block IDs that the step may write, or loads that begin with it.
        tokens: number of tokens to compute.
        stores: ranges that the step computes, to be stored behind it.
        loads: ranges that are loaded inside the step.
        waiting: ranges that requests in no step wait for.
        sources: by request that stores, its block IDs up to the last that is stored; empty where
            loads are never inside a step.
        computed_hits: number of requests in it that are computed, though they could be loaded.
        number: by which workers report that it has ended; None if nobody asks.
        unserved: promised loads that are not described; they count as failed.
        epoch: number of the epoch in which it was described; see `connector.epochs`.
    """

    written: frozenset[int]
    tokens: int
    stores: Sequence[TokenRange] = ()
    loads: Sequence[TokenRange] = ()
    waiting: Sequence[TokenRange] = ()
    sources: Mapping[str, Collection[int]] = field(default_factory=dict)
    computed_hits: int = 0
    number: int | None = None
    unserved: Unserved = NOTHING_UNSERVED
    epoch: int = 0

    def __post_init__(self) -> None:
        self.written |= self.unserved.all_blocks


def written_blocks(
    output: SchedulerOutput, loads: Iterable[TokenRange], block_tokens: Sequence[int]
) -> frozenset[int]:
    """Return the IDs of blocks that a step may write: those that requests did not have before.

    vLLM numbers the blocks of all groups together. A block that a request has already is full, or
    is written where nothing was stored.

    Args:
        output: vLLM's, of the step.
        loads: that begin with it.
        block_tokens: by group, as vLLM counts them, tokens of a block; 0 for one without tokens.
    """
    written: set[int] = set()

    def add(blocks: Sequence[Sequence[int]], computed: int) -> None:
        for ids, tokens in zip(blocks, block_tokens, strict=True):
            written.update(ids[computed // tokens if tokens else 0 :])

    for request in output.scheduled_new_reqs:
        add(request.block_ids, request.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for name, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if blocks is not None:
            add(blocks, computed if name in cached.resumed_req_ids else 0)
    for load in loads:
        add(load.blocks, load.kept)
    written.discard(NULL_BLOCK)
    return frozenset(written)


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """A worker tells the scheduler what became of loads.

    Args:
        requests: IDs of those that waited for a load which failed.
        damaged: IDs of those of which the server has something that is not what it should be.
        speed: of the last loads, in tokens per second; None where none has ended.
        step: number of the step that has ended; None if nobody asks.
        outdated: number of the epoch in which the weights changed; -1 for none.
    """

    def __init__(
        self,
        requests: Iterable[str] = (),
        damaged: Iterable[str] = (),
        speed: float | None = None,
        step: int | None = None,
        outdated: int = -1,
    ) -> None:
        self.outdated = outdated
        self.requests = frozenset(requests)
        self.damaged = frozenset(damaged)
        self.speed = speed
        self.step = step

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """What several workers said, as one; with several, no speed is asked for."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.requests | other.requests,
            self.damaged | other.damaged,
            outdated=max(self.outdated, other.outdated),
        )
