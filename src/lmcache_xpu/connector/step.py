"""A step of vLLM: what workers must know of it, what they report, and which blocks it writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.connector.request_guard import NOTHING_UNSERVED, Unserved
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_xpu.model.kv_cache_groups import CacheGroup


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # untyped base
    """What the workers must know of a step."""

    written: frozenset[int]  # block IDs that it may write, or loads that begin with it
    tokens: int  # number of tokens to compute
    stores: Sequence[TokenRange] = ()  # that it computes, to be stored behind it
    loads: Sequence[TokenRange] = ()  # inside the step
    waiting: Sequence[TokenRange] = ()  # that requests in no step wait for
    # By request that stores, its block IDs up to the last that is stored; empty where loads are
    # never inside a step.
    sources: Mapping[str, Collection[int]] = field(default_factory=dict)
    computed_hits: int = 0  # requests in it that are computed, though they could be loaded
    number: int | None = None  # by which workers report that it has ended; None if nobody asks
    unserved: Unserved = NOTHING_UNSERVED  # promised, not described: they count as failed
    epoch: int = 0  # in which it was described; see `keys`

    def __post_init__(self) -> None:
        self.written = self.written.union(self.unserved.blocks, *self.unserved.waiting.values())


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # untyped base
    """What a worker reports to the scheduler."""

    requests: Set[str] = frozenset()  # that waited for a load which failed
    damaged: Set[str] = frozenset()  # of which the server has something that it should not have
    speed: float | None = None  # tokens per second of the last loads; None where none has ended
    step: int | None = None  # number of the step that has ended; None if nobody asks
    outdated: int = -1  # number of the epoch in which the weights changed; -1 for none

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """What several workers reported, as one; with several, no speed is asked for."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.requests | other.requests,
            self.damaged | other.damaged,
            outdated=max(self.outdated, other.outdated),
        )


def written_blocks(
    step: SchedulerOutput, block_tokens: Iterable[int], loads: Iterable[TokenRange] = ()
) -> frozenset[int]:
    """Return the IDs of blocks that a step may write: those that requests did not have before.

    And those of `loads` that begin with it. vLLM numbers the blocks of all groups together, of so
    many tokens each; a group without tokens has 0. A block that a request has already is full, or
    is written where nothing was stored.
    """
    cached = step.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    # Blocks, and how many of their tokens are computed.
    begun: list[tuple[Sequence[Sequence[int]], int]] = [
        *((new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs),
        # A resumed request gets all of its blocks anew; another one those that it lacked.
        *((ids or (), n if name in cached.resumed_req_ids else 0) for name, ids, n in rows),
        *((load.blocks, load.kept) for load in loads),
    ]
    written: set[int] = set()
    for blocks, computed in begun:
        for ids, tokens in zip(blocks, block_tokens, strict=False):
            written.update(ids[computed // tokens if tokens else 0 :])
    written.discard(NULL_BLOCK)
    return frozenset(written)


def may_load_in_steps(
    config: VllmConfig, cache: KVCacheConfig, groups: Sequence[CacheGroup], *, is_local: bool
) -> bool:
    """Return whether an engine's loads can be inside steps; `groups` of its cache are stored."""
    if config.parallel_config.world_size > 1:
        return False  # the other ranks would store what came of a load that failed on one
    windows = [group.window is not None for group in groups if not group.recurrent]
    if len(cache.kv_cache_groups) != len(groups) or all(windows):
        return False
    if len(windows) == len(groups):
        return not cache.needs_kv_cache_zeroing
    # vLLM zeroes new blocks of attention beside states, and copies a state before the first layer:
    # both come behind a load that begins as the step is described.
    return is_local and not any(windows)


def awaiting_layers(config: VllmConfig) -> list[str]:
    """Return the names of the layers in which vLLM calls connectors, in the order of the engine.

    An indexer of sparse attention has a KV cache too, but reads it without a call.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    # vLLM adds a layer when it makes it, and makes layers in the order in which it computes them.
    layers = config.compilation_config.static_forward_context
    return [name for name, each in layers.items() if isinstance(each, (Attention, MLAAttention))]


def may_run_as_one_graph(config: VllmConfig, context: Any, arguments: dict[str, Any]) -> bool:
    """Return whether a step may run as one graph, which does not stop at the layers.

    By vLLM's forward context, of the step or an empty one, and by what vLLM passes to
    `start_load_kv` beside it.
    """
    if context.attn_metadata is not None and "attn_metadata" not in arguments:
        return bool(context.cudagraph_runtime_mode.name == "FULL")  # decided already
    # The newer model runner loads before it decides.
    mode = config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return False
    step = arguments.get("scheduler_output")
    if step is None or mode.mixed_mode().name == "FULL":
        return True
    decode_tokens = 1 + (config.num_speculative_tokens or 0)
    return max(step.num_scheduled_tokens.values(), default=0) <= decode_tokens
