"""What the scheduler's half tells the workers of a step, and what they report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_xpu.kv_connector.load_policy import LoadSpeeds
from lmcache_xpu.kv_connector.promises import NOTHING_UNSERVED, Unserved
from lmcache_xpu.mp_connector.kv_cache_groups import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["Step", "TokenRange", "WorkerReport", "written_blocks"]

UNKNOWN = LoadSpeeds()


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Whole chunks of a request, to be looked up, loaded or stored.

    Args:
        request_id: ID of the request.
        tokens: all of the request, as LMCache's keys have them.
        start: first token of the range.
        end: the one after the last.
        salt: what sets the request's KV apart beside its tokens; see `keys`.
        options: LMCache's options of the request.
        blocks: by KV cache group of vLLM, block IDs of the range.
        kept: leading tokens of the range that vLLM's own prefix cache has; a load leaves them out.
    """

    request_id: str
    tokens: Any
    start: int
    end: int
    salt: str = ""
    options: dict[str, Any] | None = None
    blocks: Sequence[Sequence[int]] = ()
    kept: int = 0


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
        epoch: number of the epoch in which it was described; see `kv_connector.epochs`.
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
        speeds: of the last loads.
        step: number of the step that has ended; None if nobody asks.
        outdated: number of the epoch in which the weights changed; -1 for none.
    """

    def __init__(
        self,
        requests: Iterable[str] = (),
        damaged: Iterable[str] = (),
        speeds: LoadSpeeds = UNKNOWN,
        step: int | None = None,
        outdated: int = -1,
    ) -> None:
        self.outdated = outdated
        self.requests = frozenset(requests)
        self.damaged = frozenset(damaged)
        self.speeds = speeds
        self.step = step

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """What several workers said, as one; with several, no speed is asked for."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.requests | other.requests,
            self.damaged | other.damaged,
            outdated=max(self.outdated, other.outdated),
        )
