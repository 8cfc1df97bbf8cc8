"""One step of a vLLM engine: the blocks that it writes, and the same step without some requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

__all__ = ["IDLE_S", "may_run_as_one_graph", "with_answers", "without", "written_blocks"]

# That a worker waits in a step without tokens; as vLLM's own loop, where the engine has a process.
IDLE_S = 0.001
FULL = "FULL"  # vLLM's CUDAGraphMode


def written_blocks(
    step: SchedulerOutput, block_size: int, kept: Mapping[str, int]
) -> frozenset[int]:
    """Return the blocks that a step, or a load, may write for the first time since they were given.

    Args:
        step: what is scheduled.
        block_size: tokens of a block.
        kept: number of tokens that vLLM has itself, by request that has tokens to load; vLLM
            counts the latter as computed as well.
    """
    blocks: set[int] = set()

    def add(request: str, groups: tuple[list[int], ...] | None, computed: int) -> None:
        skip = min(computed, kept.get(request, computed)) // block_size
        for group in groups or ():
            blocks.update(group[skip:])

    for new in step.scheduled_new_reqs:
        add(new.req_id, new.block_ids, new.num_computed_tokens)
    cached = step.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request, groups, computed in rows:
        # A resumed request gets all of its blocks anew; another one those that it lacked.
        add(request, groups, computed if request in cached.resumed_req_ids else 0)
    return frozenset(blocks)


def with_answers(step: SchedulerOutput) -> SchedulerOutput:
    """Return a step in which a preempted request's prompt includes what it has answered so far.

    For its newer model runner, vLLM describes such a request as a new one, and LMCache reads the
    prompt alone. But a hit may reach into the answer: that part would never be loaded, though its
    tokens count as computed.
    """
    if not any(_has_answered(new) for new in step.scheduled_new_reqs):
        return step
    requests = [
        replace(new, prompt_token_ids=new.prefill_token_ids) if _has_answered(new) else new
        for new in step.scheduled_new_reqs
    ]
    return replace(step, scheduled_new_reqs=requests)


def without(step: SchedulerOutput, left_out: Collection[str]) -> SchedulerOutput:
    """Return a step without some of its requests, by their IDs."""
    if not left_out:
        return step
    cached = step.scheduled_cached_reqs
    new = [each for each in step.scheduled_new_reqs if each.req_id not in left_out]
    left = [at for at, request in enumerate(cached.req_ids) if request not in left_out]
    if len(new) == len(step.scheduled_new_reqs) and len(left) == len(cached.req_ids):
        return step
    requests = replace(
        cached,
        req_ids=[cached.req_ids[at] for at in left],
        new_token_ids=[cached.new_token_ids[at] for at in left if cached.new_token_ids],
        new_block_ids=[cached.new_block_ids[at] for at in left],
        num_computed_tokens=[cached.num_computed_tokens[at] for at in left],
        num_output_tokens=[cached.num_output_tokens[at] for at in left],
    )
    return replace(step, scheduled_new_reqs=new, scheduled_cached_reqs=requests)


def _has_answered(new: NewRequestData) -> bool:
    tokens, prompt = getattr(new, "prefill_token_ids", None), new.prompt_token_ids
    return tokens is not None and prompt is not None and len(tokens) > len(prompt)


def may_run_as_one_graph(config: VllmConfig, context: Any, arguments: dict[str, Any]) -> bool:
    """Return whether this step may run as one graph, which does not stop at the layers.

    Args:
        config: of the engine.
        context: vLLM's forward context; of the step, or an empty one.
        arguments: what vLLM passes to `start_load_kv` beside the context.
    """
    if context.attn_metadata is not None and "attn_metadata" not in arguments:
        return bool(context.cudagraph_runtime_mode.name == FULL)  # decided already
    # The newer model runner loads before it decides.
    mode = config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return False
    step = arguments.get("scheduler_output")
    if step is None or mode.mixed_mode().name == FULL:
        return True
    decode_tokens = 1 + (config.num_speculative_tokens or 0)
    return max(step.num_scheduled_tokens.values(), default=0) <= decode_tokens
