"""One step of a vLLM engine: what the scheduler's half of the connector tells the worker's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_xpu.kv_connector.epochs import FIRST, Epoch
from lmcache_xpu.kv_connector.promises import NOTHING_UNSERVED, Unserved
from lmcache_xpu.versions.lmcache import LMCacheConnectorMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from lmcache_xpu.versions.lmcache import ReqMeta

__all__ = [
    "IDLE_S",
    "StepMetadata",
    "may_run_as_one_graph",
    "with_answers",
    "without",
    "without_answering",
    "written_blocks",
]

# That a worker waits in a step without tokens; as vLLM's own loop, where the engine has a process.
IDLE_S = 0.001
FULL = "FULL"  # vLLM's CUDAGraphMode


@dataclass
class StepMetadata(LMCacheConnectorMetadata):  # type: ignore[misc]  # untyped base
    """LMCache's description of a step, and what the worker must know beside it.

    Args:
        requests: LMCache's, what to load and store of each request.
        new_blocks: IDs of the blocks that the step may write for the first time since a request
            got them, see `written_blocks`; None if that is not known.
        tokens: number of tokens to compute; None if that is not known.
        epoch: in which the step was described.
        loads: of requests that wait for them, and are in no step yet; see `async_loads`.
        arrived: requests that were said to have all that they waited for, since the last step.
        computed_hits: number of requests in it that are computed, though they could be loaded.
        number: by which workers report that it has ended; None if nobody asks.
        unserved: promised loads that are not described; they count as failed.
        prompts: vLLM's own lists of the tokens of its new requests, by request; not sent.
    """

    new_blocks: frozenset[int] | None = None
    tokens: int | None = None
    epoch: Epoch = FIRST
    loads: list[ReqMeta] = field(default_factory=list)
    arrived: frozenset[str] = frozenset()
    computed_hits: int = 0
    number: int | None = None
    unserved: Unserved = NOTHING_UNSERVED
    prompts: Mapping[str, list[int]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what workers in other processes are told.

        vLLM sends a step with its description of new requests as one pickle, which holds a list
        once, however often it is named. Of 65,536 tokens a list takes milliseconds there and back,
        in which nothing is loaded yet.
        """
        requests = [_named_by_prompt(each, self.prompts) for each in self.requests]
        return {**vars(self), "requests": requests, "prompts": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        requests = [_with_own_tokens(request) for request in state["requests"]]
        self.__dict__.update(state, requests=requests)


class _OfPrompt(NamedTuple):
    """The first tokens of a prompt."""

    prompt: list[int]
    tokens: int


def _named_by_prompt(request: ReqMeta, prompts: Mapping[str, list[int]]) -> ReqMeta:
    """Return a request whose tokens are a part of vLLM's own list, where they are."""
    prompt, count = prompts.get(request.req_id), len(request.token_ids)
    if prompt is None or prompt[:count] != request.token_ids:  # a cache salt exchanges some
        return request
    return replace(request, token_ids=_OfPrompt(prompt, count))


def _with_own_tokens(request: ReqMeta) -> ReqMeta:
    if not isinstance(request.token_ids, _OfPrompt):
        return request
    prompt, count = request.token_ids
    return replace(request, token_ids=prompt[:count])


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


def without_answering(step: SchedulerOutput, answering: set[str]) -> SchedulerOutput:
    """Return a step without the requests that have come to their answers.

    Where answers are not stored, LMCache has nothing to do for these and still looks at each of
    them. One that was left out stays so until it is given other blocks: LMCache counts what it is
    told of a request's blocks.

    Args:
        step: what is scheduled; one token at a time of each answer.
        answering: requests that were left out so far; kept up to date.
    """
    cached = step.scheduled_cached_reqs
    answering.difference_update(step.finished_req_ids, cached.resumed_req_ids)
    answering.difference_update(new.req_id for new in step.scheduled_new_reqs)
    answering.update(
        request
        for request, answered in zip(cached.req_ids, cached.num_output_tokens, strict=True)
        if answered
        and step.num_scheduled_tokens[request] == 1
        and request not in cached.resumed_req_ids
    )
    return without(step, answering)


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
