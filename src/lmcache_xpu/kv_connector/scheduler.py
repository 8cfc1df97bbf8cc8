"""The scheduler's half of the connector: what it adds to LMCache's description of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_transfer

from lmcache_xpu.cache_engine.cache_salt import Isolation
from lmcache_xpu.kv_connector import garbage
from lmcache_xpu.kv_connector.early_loads import ScheduledLoads
from lmcache_xpu.kv_connector.epochs import Epochs
from lmcache_xpu.kv_connector.hit_sources import hit_sources, lone_source
from lmcache_xpu.kv_connector.step_metadata import STEP, StepFacts, written_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

    from lmcache_xpu.kv_connector.epochs import WeightsChanged
    from lmcache_xpu.kv_connector.kv_events import KVEvents
    from lmcache_xpu.kv_connector.worker_report import WorkerReport

__all__ = ["SchedulerSide"]


class SchedulerSide:
    """Told of requests and steps by vLLM's scheduler.

    Args:
        adapter: LMCache's connector.
        config: of the engine.
        block_size: tokens of a block.
    """

    def __init__(self, adapter: Any, config: VllmConfig, block_size: int) -> None:
        self.events: KVEvents | None = None  # where the engine publishes them
        self._adapter = adapter
        self._kept: dict[str, int] = {}  # tokens of vLLM's own, of requests that were looked up
        self._filled: set[int] = set()  # blocks that requests got since the last step
        self._config = config
        self._block_size = block_size
        self._epochs = Epochs()
        self._isolation = Isolation(adapter, self._epochs.of)
        self._loads = ScheduledLoads(adapter, block_size, self._worker, self._isolation.named)

    def admit(self, request: Request, kept: int = 0) -> None:
        """Before a request is looked up, of which vLLM's own prefix cache has some tokens."""
        self._kept[request.request_id] = kept
        garbage.put_off()
        if (worker := self._worker()) is not None:
            self._change_weights(worker.weights_changed)
        self._epochs.admit(request.request_id, kept)
        self._isolation.admit(request)
        if self.events is not None:
            self.events.admit(request)

    def give_up_hits(self, request_id: str) -> None:
        """When a load of a request has failed: nothing is found for it any more."""
        self._isolation.compute(request_id)

    def allocated(self, request: Request, blocks: KVCacheBlocks) -> None:
        """A request has its blocks, and will be in the next step."""
        numbers = blocks.get_block_ids()[0]
        # Another connector may load into them, in this step or while the request waits.
        kept = self._kept.pop(request.request_id, 0) // self._block_size
        self._filled.update(numbers[kept:])
        self._loads.begin(request, numbers)

    def describe(self, metadata: Any, step: SchedulerOutput) -> None:
        """Complete LMCache's description of a step."""
        kept = {
            request.req_id: request.load_spec.vllm_cached_tokens
            for request in metadata.requests
            if request.load_spec is not None
        }
        written = written_blocks(step, self._block_size, kept) | self._filled
        self._filled.clear()
        setattr(metadata, STEP, StepFacts(written, step.total_num_scheduled_tokens))
        self._isolation.mark(metadata)
        self._epochs.describe(metadata)
        if self.events is not None:
            self.events.describe(metadata)
        self._loads.mark(metadata)
        self._own_blocks(step)
        if self._worker() is None:  # which has a step of its own to enqueue
            garbage.allow()

    def finished(self, request_id: str) -> None:
        """When a request has ended, in whatever way."""
        self._isolation.finished(request_id)
        self._epochs.finished(request_id)
        self._kept.pop(request_id, None)
        if self.events is not None:
            self.events.finished(request_id)

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
        self._isolation.forget_lookups()
        if self.events is not None:
            self.events.clear()
        worker = self._worker()
        return worker is None or bool(worker.begin_epoch(self._epochs.current))

    def hear(self, report: WorkerReport) -> None:
        """Take what workers report after a step."""
        self._change_weights(report.weights)
        if self.events is not None and report.tiers is not None:
            self.events.report(report.tiers)

    def _change_weights(self, said: WeightsChanged | None) -> None:
        """Begin an epoch if a worker said that its weights changed in this one."""
        if said is not None and said.number >= self._epochs.current.number:
            self.reset()

    def hit_sources(self, request_id: str, tokens: int) -> dict[CacheHitSource, int]:
        """The tiers that supply a request's tokens; empty if that is not known here."""
        config = self._adapter.config
        if (source := lone_source(config)) is not None:
            return {source: tokens}
        if (engine := self._near_engine()) is None:
            return {}
        pinned = engine.lookup_pins.get(request_id, {})
        objects = engine.num_layers if engine.use_layerwise else 1
        return hit_sources(pinned, objects, config.chunk_size, tokens)

    def _own_blocks(self, step: SchedulerOutput) -> None:
        """Give LMCache a list of its own of the blocks of each request that was preempted.

        It keeps the one that vLLM describes the step with. In one process the worker keeps that,
        too, and both add what the request gets later: LMCache would store the wrong blocks.
        """
        for request_id in step.scheduled_cached_reqs.resumed_req_ids:
            if (tracker := self._adapter._request_trackers.get(request_id)) is not None:
                tracker.allocated_block_ids = list(tracker.allocated_block_ids)

    def _near_engine(self) -> Any:
        """LMCache's engine in this process, if it answers look-ups from memory."""
        worker = self._worker()
        return None if worker is None else worker.near_engine()

    def _worker(self) -> Any:
        """The worker's connector of the same engine, if it is in this process."""
        if not kv_transfer.has_kv_transfer_group():
            return None
        found = kv_transfer.get_kv_transfer_group()
        # Another connector may hold ours among others.
        if not hasattr(found, "begin_load"):
            return None
        engines = [one.kv_transfer_config for one in (self._config, found._vllm_config)]
        return found if engines[0].engine_id == engines[1].engine_id else None
