"""What the two halves of the connector tell each other, beside what LMCache's own do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from lmcache_xpu.kv_connector.load_policy import LoadSpeeds
from lmcache_xpu.kv_connector.promises import NOTHING_UNSERVED, Unserved
from lmcache_xpu.mp_connector.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.versions.lmcache_server import LMCacheMPConnectorMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["Step", "WorkerReport", "written_blocks"]


UNKNOWN = LoadSpeeds()


class Step(LMCacheMPConnectorMetadata):  # type: ignore[misc]  # untyped base
    """What the workers are told of a step.

    Args:
        requests: LMCache's descriptions of stores, and of loads that requests wait for.
        loads: those of loads inside the step.
        written: blocks that the step may write, or loads that begin with it.
        tokens: that it computes.
        sources: by request that stores, the blocks up to the last that is stored; empty where loads
            are never inside a step.
        computed_hits: number of requests in it that are computed, though they could be loaded.
        number: by which workers report that it has ended; None if nobody asks.
        unserved: promised loads that are not described; they count as failed.
    """

    def __init__(
        self,
        requests: Sequence[Any],
        loads: Sequence[Any],
        written: Collection[int],
        tokens: int,
        sources: Mapping[str, Collection[int]],
        computed_hits: int,
        number: int | None = None,
        unserved: Unserved = NOTHING_UNSERVED,
    ) -> None:
        super().__init__()
        self.requests = list(requests)
        self.loads = list(loads)
        self.written = frozenset(written) | unserved.all_blocks
        self.tokens = tokens
        self.sources = sources
        self.computed_hits = computed_hits
        self.number = number
        self.unserved = unserved


def written_blocks(
    output: SchedulerOutput, loads: Iterable[Any], block_tokens: Sequence[int]
) -> set[int]:
    """Return the blocks that a step may write: those that requests did not have before.

    vLLM numbers the blocks of all groups together. A block that a request has already is full, or
    is written where nothing was stored.

    Args:
        output: vLLM's, of the step.
        loads: LMCache's descriptions of loads that begin with it.
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
        add(load.block_ids, load.skip_first_n_tokens)
    written.discard(NULL_BLOCK)
    return written


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """A worker tells the scheduler what became of loads.

    Args:
        requests: names of those that waited for a load which failed.
        damaged: those of which the server has something that is not what it should be.
        speeds: of the last loads.
        step: number of the step that has ended; None if nobody asks.
    """

    def __init__(
        self,
        requests: Iterable[str] = (),
        damaged: Iterable[str] = (),
        speeds: LoadSpeeds = UNKNOWN,
        step: int | None = None,
    ) -> None:
        self.requests = frozenset(requests)
        self.damaged = frozenset(damaged)
        self.speeds = speeds
        self.step = step

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """What several workers said, as one; with several, no speed is asked for."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.requests | other.requests, self.damaged | other.damaged)
