"""The scheduler's half of the connector: which requests LMCache is shown.

LMCache names a chunk by its tokens and the model. What else decides on a request's KV it does not
know, or in one of its modes alone: so requests with a `cache_salt`, an adapter, images or given
embeddings are computed as if there were no LMCache, and so is everything after a reset.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_xpu.stock.half import StockHalf

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


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
        or request.kv_transfer_params is not None
    )


class StockScheduler(StockHalf):
    """Called by vLLM's scheduler; its methods are vLLM's, where nothing else is said."""

    ROLE, NEEDS = KVConnectorRole.SCHEDULER, "lookup_client"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shown: set[str] = set()  # requests that LMCache knows
        self.failed: set[str] = set()  # requests of which a load has failed
        self.stopped = False

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of tokens that can be loaded beyond those that vLLM has."""
        name = request.request_id
        if self.stopped or name in self.failed or not may_be_served(request):
            self.shown.discard(name)
            return 0, False
        self.shown.add(name)
        return self.lmcache.get_num_new_matched_tokens(request, num_computed_tokens) or 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and loads so many tokens in the next step."""
        if request.request_id in self.shown:
            self.lmcache.update_state_after_alloc(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what LMCache's half in the worker is to load and store in a step."""
        return self.lmcache.build_connector_meta(as_shown(scheduler_output, self.shown))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended; its blocks may be freed at once."""
        name = request.request_id
        self.failed.discard(name)
        # Of one that was looked up and never scheduled; another one may get its name.
        self.lmcache.lookup_client.clear_lookup_status(name)
        self.lmcache.load_specs.pop(name, None)
        answer: tuple[bool, dict[str, Any] | None] = (False, None)
        if name in self.shown:
            self.shown.discard(name)
            answer = self.lmcache.request_finished(request, block_ids)
        return answer

    def give_up_hits(self, request_id: str) -> None:
        """Show LMCache nothing of a request any more: a load of it failed."""
        self.failed.add(request_id)
        self.shown.discard(request_id)

    def reset_cache(self) -> bool:
        """Look up and store nothing any more: LMCache's keys are the same before and after."""
        if not self.stopped:
            self.stopped = True
            self.shown.clear()
            logger.warning(
                "The cache was reset: this engine looks up and stores nothing in LMCache until it "
                "is restarted (docs: troubleshooting#stock-stopped)"
            )
        return True


def as_shown(step: SchedulerOutput, shown: Collection[str]) -> SchedulerOutput:
    """Return a step with these requests alone, by their IDs, and as LMCache has to see them.

    LMCache keeps the list of a preempted request's new blocks. In one process vLLM's worker keeps
    the same one, and both add what the request gets later: so LMCache gets lists of its own.
    """
    cached = step.scheduled_cached_reqs
    at = [number for number, name in enumerate(cached.req_ids) if name in shown]
    columns = {field.name: getattr(cached, field.name) for field in fields(cached)}
    kept = {  # a column that vLLM leaves empty stays so
        name: [column[number] for number in at]
        for name, column in columns.items()
        if isinstance(column, list) and column
    }
    if blocks := kept.get("new_block_ids"):
        kept["new_block_ids"] = [groups and tuple(map(list, groups)) for groups in blocks]
    # For its newer model runner, vLLM describes a preempted request as a new one, and LMCache reads
    # the prompt alone. A hit may reach into the answer: that part would never be loaded, though its
    # tokens count as computed.
    new = [
        replace(
            each, prompt_token_ids=getattr(each, "prefill_token_ids", None) or each.prompt_token_ids
        )
        for each in step.scheduled_new_reqs
        if each.req_id in shown
    ]
    return replace(step, scheduled_new_reqs=new, scheduled_cached_reqs=replace(cached, **kept))
