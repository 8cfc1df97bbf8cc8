"""The scheduler's half of the connector: what can be loaded, and what a step is for the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_xpu.cache_engine.cache_salt import CacheSalts
from lmcache_xpu.cache_engine.ending import end_lmcache
from lmcache_xpu.kv_connector.async_loads import AsyncLoads
from lmcache_xpu.kv_connector.early_loads import EarlyLoads
from lmcache_xpu.kv_connector.epochs import Epochs
from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.hit_sources import hit_sources, lone_source
from lmcache_xpu.kv_connector.load_policy import Hit
from lmcache_xpu.kv_connector.near_worker import near_connector
from lmcache_xpu.kv_connector.promises import Promises
from lmcache_xpu.kv_connector.request_guard import ServedRequest
from lmcache_xpu.kv_connector.step_metadata import (
    StepMetadata,
    with_answers,
    without,
    without_answering,
    written_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

    from lmcache_xpu.kv_connector.epochs import WeightsChanged
    from lmcache_xpu.kv_connector.kv_events import KVEvents
    from lmcache_xpu.kv_connector.load_policy import LoadPolicy
    from lmcache_xpu.kv_connector.worker import WorkerSide
    from lmcache_xpu.kv_connector.worker_report import WorkerReport

__all__ = ["SchedulerSide"]


class SchedulerSide:
    """Told of requests and steps by vLLM's scheduler.

    Args:
        adapter: LMCache's connector.
        config: of the engine.
        block_size: tokens of a block.
        policy: says which requests wait for their loads; None: none does.
        events: turns the workers' reports into vLLM's KV events, where the engine publishes them.
        answers_unseen: answers are not stored, and come one token at a time.
    """

    def __init__(
        self,
        adapter: Any,
        config: VllmConfig,
        block_size: int,
        policy: LoadPolicy | None = None,
        events: KVEvents | None = None,
        *,
        answers_unseen: bool = False,
    ) -> None:
        self._adapter = adapter
        self._config = config
        self._block_size = block_size
        self._events = events
        self._policy = policy
        self._running: set[str] = set()  # requests of the last step
        self._kept: dict[str, int] = {}  # tokens of vLLM's own, of requests that were looked up
        self._computed_hits: set[str] = set()  # requests that are computed, of those
        self._answering: set[str] = set()  # requests of which LMCache need not hear
        self._answers_unseen = answers_unseen
        self._filled: set[int] = set()  # blocks that requests got since the last step
        self._collection = GarbageCollection()
        self._promises = Promises(block_size)
        self._epochs = Epochs()
        self._salts = CacheSalts(adapter, self._epochs.of)
        self._loads = EarlyLoads(adapter, block_size, self._worker, self._salts.named)
        self._async_loads = AsyncLoads(adapter, block_size, self._salts.named)
        adapter.lookup_client.ask_near(self._near_engine)

    # Requests

    def matched_tokens(self, request: Request, kept: int) -> tuple[int | None, bool]:
        """Look a request up.

        Args:
            request: that may be scheduled next.
            kept: number of tokens that vLLM's own prefix cache has.

        Returns:
            The number of tokens that can be loaded beyond those, and whether the request waits for
            them. None if it is to be asked again: another request loads what it lacks first.
        """
        if request.request_id in self._promises.broken:
            return 0, False
        tokens, waits = self._matched_tokens(request, kept)
        if tokens:
            self._promises.promise(request.request_id, kept, waits=waits)
        return tokens, waits

    def _matched_tokens(self, request: Request, kept: int) -> tuple[int | None, bool]:
        if self._async_loads.missed(request.request_id):
            self.give_up_hits(request.request_id)
        if self._async_loads.shares(request, kept) and self._finds_blocks_again():
            return None, False
        self.admit(request, kept)
        tokens: int | None = self._adapter.get_num_new_matched_tokens(request, kept)
        if not tokens or self._policy is None:
            self._computed_hits.discard(request.request_id)
            self._async_loads.choose(request.request_id, waits=False)
            return tokens, False
        far = self._adapter.lookup_client.far_tokens(request.request_id)
        hit = Hit(tokens, request.num_tokens - kept - tokens, far)
        computed = self._policy.computes(hit)
        (self._computed_hits.add if computed else self._computed_hits.discard)(request.request_id)
        if computed:  # LMCache still knows what it has, and stores none of that again
            self._async_loads.choose(request.request_id, waits=False)
            return 0, False
        # Of images and embeddings LMCache makes names of its own, with a step.
        named_later = request.mm_features or request.prompt_embeds is not None
        others = bool(self._running - {request.request_id})
        waits = not named_later and self._policy.waits(hit, others=others)
        self._async_loads.choose(request.request_id, waits=waits)
        return tokens, waits

    def _finds_blocks_again(self) -> bool:
        return bool(self._config.cache_config.enable_prefix_caching)

    def admit(self, request: Request, kept: int = 0) -> None:
        """Hear of a request before it is looked up; for `kept` see `matched_tokens`."""
        self._kept[request.request_id] = kept
        worker = self._worker()
        collection = self._collection if worker is None else worker.collection
        collection.put_off()
        if worker is not None:
            self._change_weights(worker.epoch.changed)
        self._epochs.admit(request.request_id, kept)
        self._salts.admit(request)
        if self._events is not None:
            self._events.admit(request)

    def compute(self, request_id: str) -> None:
        """Take back what a failed look-up may have promised to a request, and look up no more."""
        self.give_up_hits(request_id)
        self._adapter.load_specs.pop(request_id, None)
        self._computed_hits.discard(request_id)
        self._async_loads.choose(request_id, waits=False)

    def fail(self, request_id: str) -> None:
        """Give a request up that has its blocks: what it was promised counts as a failed load."""
        self.compute(request_id)
        self._promises.fail([request_id])

    def give_up_hits(self, request_id: str) -> None:
        """Find nothing for a request any more: a load of it has failed."""
        self._salts.compute(request_id)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Hear that a request has its blocks, and will be in the next step.

        Args:
            request: that was looked up.
            blocks: all of its blocks.
            external_tokens: number of tokens to be loaded.
        """
        request_id = request.request_id
        numbers = blocks.get_block_ids()[0]
        self._promises.allocated(request_id, numbers, external_tokens)
        if request_id in self._promises.broken:
            return
        self._adapter.update_state_after_alloc(ServedRequest(request), external_tokens)
        kept = self._kept.pop(request_id, 0)
        there = self._async_loads.allocated(request, numbers, external_tokens)
        # Another connector may load into them, in this step or while the request waits.
        self._filled.update(numbers[(kept if there is None else there) // self._block_size :])
        if request_id in self._adapter.load_specs:
            self._loads.begin(request, numbers)
        else:
            self._salts.loads(request_id)

    def finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended, in whatever way; see vLLM's `request_finished`."""
        request_id = request.request_id
        self._salts.finished(request_id)
        self._epochs.finished(request_id)
        self._kept.pop(request_id, None)
        self._running.discard(request_id)
        self._computed_hits.discard(request_id)
        self._async_loads.finished(request_id)
        self._promises.finished(request_id)
        if self._events is not None:
            self._events.finished(request_id)
        ended: tuple[bool, dict[str, Any] | None]
        ended = self._adapter.request_finished(ServedRequest(request), block_ids)
        return ended

    # Steps

    def describe(self, step: SchedulerOutput) -> StepMetadata:
        """Return what the workers must know of a step."""
        shown = without(with_answers(step), self._promises.broken)
        if self._answers_unseen:
            shown = without_answering(shown, self._answering)
        described = self._adapter.build_connector_meta(shown)
        kept = {
            request.req_id: request.load_spec.vllm_cached_tokens
            for request in described.requests
            if request.load_spec is not None
        }
        metadata = StepMetadata(
            described.requests,
            new_blocks=written_blocks(step, self._block_size, kept) | self._filled,
            tokens=step.total_num_scheduled_tokens,
            prompts={new.req_id: new.prompt_token_ids or [] for new in shown.scheduled_new_reqs},
        )
        self._running = set(step.num_scheduled_tokens)
        metadata.computed_hits = len(self._computed_hits & self._running)
        self._computed_hits -= self._running
        self._salts.mark(metadata)
        self._epochs.describe(metadata)
        if self._events is not None:
            self._events.describe(metadata)
        self._async_loads.describe(metadata)
        if self._policy is not None:
            loads = any(r.load_spec is not None and r.load_spec.can_load for r in metadata.requests)
            metadata.number = self._policy.begin_step(step.total_num_scheduled_tokens, loads=loads)
        self._own_blocks(step)
        self._end_description(metadata)
        return metadata

    def describe_failed(self, step: SchedulerOutput) -> StepMetadata:
        """Return what the workers must know of a step whose description failed: no transfers."""
        self._promises.fail_step(step.num_scheduled_tokens)
        self._async_loads.drop_untold()
        metadata = StepMetadata(
            [],
            new_blocks=written_blocks(step, self._block_size, {}) | self._filled,
            tokens=step.total_num_scheduled_tokens,
        )
        self._running = set(step.num_scheduled_tokens)
        self._epochs.describe(metadata)
        self._async_loads.describe(metadata)
        self._end_description(metadata)
        return metadata

    def _end_description(self, metadata: StepMetadata) -> None:
        self._filled.clear()
        metadata.unserved = self._promises.describe()
        if metadata.new_blocks is not None:
            metadata.new_blocks |= metadata.unserved.all_blocks
        self._collection.allow()  # a worker in this process has a step of its own to enqueue

    def _own_blocks(self, step: SchedulerOutput) -> None:
        """Give LMCache a list of its own of the blocks of each request that was preempted.

        It keeps the one that vLLM describes the step with. In one process the worker keeps that,
        too, and both add what the request gets later: LMCache would store the wrong blocks.
        """
        for request_id in step.scheduled_cached_reqs.resumed_req_ids:
            if (tracker := self._adapter._request_trackers.get(request_id)) is not None:
                tracker.allocated_block_ids = list(tracker.allocated_block_ids)

    # Epochs

    def bind(self, pool: Any) -> None:
        """Take vLLM's pool of blocks, to see whether its own prefix cache is empty."""
        self._epochs.pool = pool

    def reset(self) -> bool:
        """Begin an epoch, in which nothing is found that was stored before.

        Returns:
            False if a worker in this process could not give back the room of all that it stored.
            Workers elsewhere do so with the next step.
        """
        self._epochs.begin()
        self._salts.forget_lookups()
        if self._events is not None:
            self._events.clear()
        worker = self._worker()
        return worker is None or worker.epoch.begin(self._epochs.current)

    def end_step(self, report: WorkerReport | None, arrived: Iterable[str] = ()) -> None:
        """Hear that a step has ended, what the workers report, and whose loads have arrived."""
        self._async_loads.hear(arrived)
        if report is None:
            return
        if self._policy is not None:
            self._policy.end_step(report.step)
            self._policy.hear(report.speeds)
        self._change_weights(report.weights)
        if self._events is not None and report.tiers is not None:
            self._events.report(report.tiers)

    def _change_weights(self, change: WeightsChanged | None) -> None:
        """Begin an epoch if a worker said that its weights changed in this one."""
        if change is not None and change.number >= self._epochs.current.number:
            self.reset()

    # What vLLM is told

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events of the tiers since the last call; see `kv_events`."""
        return () if self._events is None else self._events.take()

    def hit_sources(self, request_id: str, tokens: int) -> dict[CacheHitSource, int]:
        """Return the tiers that supply a request's tokens; nothing if that is not known here."""
        config = self._adapter.config
        if (source := lone_source(config)) is not None:
            return {source: tokens}
        if (engine := self._near_engine()) is None:
            return {}
        pinned = engine.lookup_pins.get(request_id, {})
        objects = engine.num_layers if engine.use_layerwise else 1
        return hit_sources(pinned, objects, config.chunk_size, tokens)

    def shutdown(self) -> None:
        """End what LMCache has started here."""
        self._collection.allow()
        end_lmcache(self._adapter)

    def _near_engine(self) -> Any:
        """Return LMCache's engine of the worker, if both are near; see `WorkerSide.near_engine`."""
        worker = self._worker()
        return None if worker is None else worker.near_engine()

    def _worker(self) -> WorkerSide | None:
        """Return the worker's half of the same engine, if it is in this process."""
        return getattr(near_connector(self._config), "worker_side", None)
