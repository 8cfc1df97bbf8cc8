"""A step of vLLM as LMCache is shown it: with answers, and without some requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

__all__ = ["with_answers", "without"]


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


def _has_answered(new: NewRequestData) -> bool:
    tokens, prompt = getattr(new, "prefill_token_ids", None), new.prompt_token_ids
    return tokens is not None and prompt is not None and len(tokens) > len(prompt)


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
