"""The scheduler's half of the connector: which requests LMCache is shown, and what workers know.

LMCache names a chunk by its tokens and the model. What else decides on a request's KV it does not
know, or in one of its modes alone: so requests with a `cache_salt`, an adapter, images or given
embeddings are computed as if there were no LMCache, and so is everything after a reset or a change
of the weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_xpu.connector.request_guard import Promises
from lmcache_xpu.connector.step import written_blocks
from lmcache_xpu.stock.health import check_healthy
from lmcache_xpu.stock.step import with_answers, without
from lmcache_xpu.versions.lmcache import LMCacheConnectorMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Step", "StockScheduler", "WeightsChanged", "may_be_served"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # untyped base
    """What workers must know of a step of the engine.

    Args:
        lmcache: LMCache's description of what it loads and stores.
        new_blocks: IDs of the blocks that the step may write for the first time since a request
            got them, see `written_blocks`.
        unserved: IDs of blocks whose promised loads are not described; they count as failed.
        ended: IDs of requests that were looked up, and have ended before they were in any step.
    """

    lmcache: Any
    new_blocks: frozenset[int] = frozenset()
    unserved: frozenset[int] = frozenset()
    ended: tuple[str, ...] = ()


class WeightsChanged(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """A worker reports to the scheduler that its weights have changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WeightsChanged:
        """Return the reports of several workers as one."""
        return self


def may_be_served(request: Request) -> bool:
    """Whether a request's tokens alone decide on its KV, and LMCache reads nothing else of it.

    vLLM takes no hit for one that must compute its whole prompt, e.g. for `prompt_logprobs`, and
    LMCache, which does not know, ends the engine when it is preempted.
    """
    return not (
        request.cache_salt
        or request.lora_request is not None
        or request.mm_features
        or request.prompt_embeds is not None
        or request.skip_reading_prefix_cache
        or request.kv_transfer_params
    )


class StockScheduler:
    """Called by vLLM's scheduler.

    Args:
        lmcache: LMCache's half of a connector.
        block_size: tokens of a block.

    Raises:
        SeamError: LMCache goes on without a cache.
    """

    def __init__(self, lmcache: Any, block_size: int) -> None:
        check_healthy(lmcache.lookup_client is not None)
        self._lmcache = lmcache
        self._block_size = block_size
        self._promises = Promises(block_size)
        self._stopped = False
        self._shown: set[str] = set()  # requests that LMCache knows
        self._looked_up: set[str] = set()  # and not in a step yet; a worker has pinned their chunks
        self._ended: list[str] = []

    def matched_tokens(self, request: Request, kept: int) -> int:
        """Return the number of tokens that can be loaded beyond those that vLLM has.

        Args:
            request: that may be scheduled next.
            kept: number of tokens that vLLM's own prefix cache has.
        """
        request_id = request.request_id
        broken = request_id in self._promises.broken
        if self._stopped or broken or not may_be_served(request):
            self._shown.discard(request_id)
            return 0
        self._shown.add(request_id)
        self._looked_up.add(request_id)
        tokens = self._lmcache.get_num_new_matched_tokens(request, kept) or 0
        if tokens:
            self._promises.promise(request_id, kept, waits=False)
        return int(tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Record that a request has its blocks, and will be in the next step.

        Args:
            request: that was looked up.
            blocks: all of its blocks.
            external_tokens: number of tokens to be loaded.
        """
        numbers = blocks.get_block_ids()[0]
        self._promises.allocated(request.request_id, numbers, external_tokens)
        if request.request_id in self._shown:
            self._lmcache.update_state_after_alloc(request, external_tokens)

    def give_up_hits(self, request_id: str) -> None:
        """Show LMCache nothing of a request any more: a load of it failed, or a hook.

        A load that it was promised, and no worker knows of, counts as failed.
        """
        self._promises.fail([request_id])
        self._shown.discard(request_id)

    def finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended, in whatever way; see vLLM's `request_finished`."""
        request_id = request.request_id
        self._promises.finished(request_id)
        if request_id in self._looked_up:
            self._looked_up.discard(request_id)
            self._ended.append(request_id)
            self._lmcache.lookup_client.clear_lookup_status(request_id)
            self._lmcache.load_specs.pop(request_id, None)
        if request_id not in self._shown:
            return False, None
        self._shown.discard(request_id)
        answer: tuple[bool, dict[str, Any] | None]
        answer = self._lmcache.request_finished(request, block_ids)
        return answer

    def describe(self, step: SchedulerOutput) -> Step:
        """Describe a step to the workers."""
        hidden = step.num_scheduled_tokens.keys() - self._shown
        described = self._lmcache.build_connector_meta(
            _with_own_blocks(without(with_answers(step), hidden))
        )
        kept = {
            request.req_id: request.load_spec.vllm_cached_tokens
            for request in described.requests
            if request.load_spec is not None
        }
        return self._described(step, described, kept)

    def describe_failed(self, step: SchedulerOutput) -> Step:
        """Describe a step whose description failed: without transfers."""
        self._promises.fail_step(step.num_scheduled_tokens)
        self._shown -= step.num_scheduled_tokens.keys()
        return self._described(step, LMCacheConnectorMetadata(), {})

    def _described(self, step: SchedulerOutput, described: Any, kept: dict[str, int]) -> Step:
        self._looked_up -= step.num_scheduled_tokens.keys()
        ended, self._ended = tuple(self._ended), []
        unserved = self._promises.describe().all_blocks
        blocks = written_blocks(step, itertools.repeat(self._block_size), kept=kept) | unserved
        return Step(described, blocks, unserved, ended)

    def stop(self, cause: str) -> None:
        """Look up and store nothing any more; may be called again.

        Args:
            cause: for the log.
        """
        if self._stopped:
            return
        self._stopped = True
        self._ended += self._looked_up
        self._looked_up.clear()
        self._shown.clear()
        logger.warning(
            "%s: this engine looks up and stores nothing in LMCache until it is restarted "
            "(docs: troubleshooting#stock-stopped)",
            cause,
        )


def _with_own_blocks(step: SchedulerOutput) -> SchedulerOutput:
    """Return a step that shares no list of a preempted request's new blocks with vLLM.

    LMCache keeps such a list. In one process vLLM's worker keeps the same one, and both add what
    the request gets later: LMCache would store the wrong blocks.
    """
    cached = step.scheduled_cached_reqs
    if not cached.resumed_req_ids:
        return step
    blocks = [groups and tuple(map(list, groups)) for groups in cached.new_block_ids]
    return dataclasses.replace(
        step, scheduled_cached_reqs=dataclasses.replace(cached, new_block_ids=blocks)
    )
