"""The worker's half of the connector: it loads before a step's layers, and stores behind them.

It owns what one worker has of the engine: the record of failed loads, the epoch, the transfers in
flight, garbage collection. The calls come in this order; the first two are not vLLM's own:

    begin_load ...            a load begins while vLLM still decides on the step
    begin_step                the step is known; its loads begin
    handle_preemptions        before vLLM may write new blocks
    bind, start_load          vLLM has prepared the step
    wait_for_layer, save_layer, for each layer
    wait_for_save, take_unfilled, in either order
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.utils import calculate_draft_layers

from lmcache_xpu.cache_engine import health
from lmcache_xpu.cache_engine.ending import end_lmcache
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.kv_connector.epochs import WorkerEpoch
from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.kv_events import TierReport
from lmcache_xpu.kv_connector.load_queue import LoadQueue
from lmcache_xpu.kv_connector.step_layers import StepLayers
from lmcache_xpu.kv_connector.step_loads import StepLoads
from lmcache_xpu.kv_connector.step_metadata import IDLE_S, may_run_as_one_graph
from lmcache_xpu.kv_connector.worker_report import NOTHING, WorkerReport
from lmcache_xpu.metrics import loaded

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext

    from lmcache_xpu.cache_engine.factory import Adapter
    from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
    from lmcache_xpu.kv_connector.rank_group import RankGroup
    from lmcache_xpu.kv_connector.step_metadata import StepMetadata
    from lmcache_xpu.tiers.residency import Residency

__all__ = ["WorkerSide"]


class WorkerSide:
    """Told of steps and layers by vLLM's model runner, on the engine's thread.

    Args:
        adapter: LMCache's connector.
        config: of the engine.
        unfilled: the record of failed loads, to which LMCache's engine reports.
        block_size: tokens of a block.
        loads_early: loads may begin before vLLM has prepared a step.
        publishes: the engine publishes KV events of the tiers.
        ranks: that share out the heads; None where this one has all.
        sharing: gives LMCache's engine one CPU tier with ranks that hold the same, and waits for
            them; None where this one has its own.
    """

    def __init__(
        self,
        adapter: Adapter,
        config: VllmConfig,
        unfilled: UnfilledBlocks,
        *,
        block_size: int,
        loads_early: bool = True,
        publishes: bool = False,
        ranks: RankGroup | None = None,
        sharing: Callable[[Any], None] | None = None,
    ) -> None:
        self.collection = GarbageCollection()
        self.epoch = WorkerEpoch(adapter.lmcache_engine, unfilled, self._forget_entries)
        self.in_flight: InFlight | None = None  # once the KV cache is registered
        self.layers = StepLayers(adapter)
        self.residency: Residency | None = None  # where the engine publishes KV events
        self.queue = LoadQueue(adapter.lmcache_engine, unfilled)
        self._adapter = adapter
        self._engine: Any = adapter.lmcache_engine
        self._config = config
        self._unfilled = unfilled
        self._block_size = block_size
        self._loads_early = loads_early
        self._publishes = publishes
        self._sharing = sharing
        self._loads = StepLoads(adapter, unfilled, ranks)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache; LMCache opens its tiers now.

        Args:
            kv_caches: one tensor for each layer, in the order in which vLLM computes them.

        Raises:
            LayoutError: a KV cache that can't be read.
            SeamError: LMCache or one of its tiers did not come up.
            SettingsError: another engine's; vLLM has one connector for all engines of a process.
        """
        if self.in_flight is not None:
            raise SettingsError(
                "a second engine in the process of one that has a KV connector",
                "one at a time: vLLM has a single KV connector in a process",
                "End the first one (`del llm`, then `gc.collect()`), or leave "
                "VLLM_ENABLE_V1_MULTIPROCESSING at 1, which gives each engine a process.",
            )
        self._adapter.register_kv_caches(kv_caches)
        health.check_healthy(self._adapter)
        extra = self._adapter.config.extra_config or {}
        self.layers.register(kv_caches)
        self.in_flight = InFlight(
            block_tokens=self._block_size,
            # vLLM makes the layers in the order in which it computes them, a drafter's last.
            model_layers=len(kv_caches) - calculate_draft_layers(self._config),
            loads=bool(extra.get("xpu.overlap_load", True)),
            stores=bool(extra.get("xpu.overlap_store", True)),
        )
        self._engine.register(list(kv_caches.values()), self.in_flight)
        health.check_tiers(self._engine, self._adapter.config)
        self.queue.register(kv_caches.values())
        if self._publishes:
            self.residency = health.watch_tiers(self._engine)

    # A step

    def begin_load(self, metadata: StepMetadata) -> bool:
        """Begin a load of the next step, while that is being decided on; see `early_loads`.

        Args:
            metadata: of one request: the blocks that are loaded, and the tokens of the request
                that remain to be computed.

        Returns:
            Whether it began; else it is left to the step.
        """
        if self.in_flight is None or not (self.in_flight.loads and self._loads_early):
            return False
        if self._sharing is not None:
            return False  # ranks come together with their first step
        # LMCache begins the layerwise loads of a step together; and a step may be under way.
        if self._engine.use_layerwise or self._adapter.step is not None:
            return False
        if self.epoch.changed is not None:
            return False  # the step's description is looked at more closely
        assert metadata.new_blocks is not None
        assert metadata.tokens is not None
        self.collection.put_off()  # until the step is enqueued
        self.in_flight.schedule(metadata.new_blocks, metadata.tokens)
        self._adapter.bind(metadata)
        try:
            self._loads.load_early()
        finally:
            self._adapter.clear()
        return True

    def begin_step(self, metadata: StepMetadata) -> bool:
        """Load what a step needs while vLLM prepares it, which takes milliseconds.

        Called first in each step (see `worker_hooks`); vLLM itself asks when it is ready to
        compute.

        Returns:
            Whether the step has begun.
        """
        if self._loads_early:
            self.bind(metadata)
            if self._loads.count:
                self.collection.put_off()  # until the step is enqueued
                self._loads.begin()
            loading = self.in_flight is not None and self.in_flight.loading
            if not (self._loads.count or loading or self._engine.use_layerwise):
                self.layers.pass_over()
        return self._loads_early

    def bind(self, metadata: StepMetadata) -> None:
        """Begin a step. Blocks that it may write wait for stores that still read them."""
        if self._adapter.step is metadata:
            return  # again would forget layerwise loads that have begun
        if self._sharing is not None:  # with the first step, to which all ranks come
            sharing, self._sharing = self._sharing, None
            sharing(self._engine)
        self._adapter.bind(metadata)
        self._loads.describe()
        self.layers.begin_step()
        self._engine.settle()
        self._unfilled.begin_step(metadata.new_blocks)
        self._unfilled.add(metadata.unserved.all_blocks)
        self.epoch.begin_step(metadata)
        if self.epoch.changed is not None:
            self._loads.refuse()
        if self.in_flight is not None:
            self.in_flight.begin_step(metadata.new_blocks, metadata.tokens)
        self.queue.await_told(metadata.arrived)
        loaded("computed", metadata.computed_hits)
        self.queue.fail(metadata.unserved.waiting)
        if metadata.loads:
            (self.queue.refuse if self.epoch.changed else self.queue.begin)(metadata.loads)

    def clear(self) -> None:
        """End a step."""
        self._adapter.clear()

    def protect(self, metadata: StepMetadata) -> None:
        """Let the engine's stream wait before vLLM may write blocks that stores still read.

        vLLM calls it first in each step, also through a MultiConnector, which `begin_step` is not.
        This thread does not wait.
        """
        if self.in_flight is not None:
            self.in_flight.protect(metadata.new_blocks)

    def start_load(self, context: ForwardContext, arguments: dict[str, Any]) -> None:
        """Load what this step needs, if that has not begun; see `StepLoads.begin_prepared`."""
        self._loads.begin_prepared(context, arguments)
        if self.in_flight is not None and may_run_as_one_graph(self._config, context, arguments):
            self.in_flight.before_all()

    def wait_for_layer(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        self.layers.wait(layer_name, self.in_flight)

    def save_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        """Store a layer whose attention is enqueued, and enqueue more of this step's loads."""
        self.layers.save(layer_name, kv_layer, attn_metadata, self.in_flight)

    def wait_for_save(self) -> None:
        """Store what this step computed, but not from blocks that a load left unfilled.

        See also `StepLoads.share_failures`.
        """
        self._loads.end(self.in_flight)
        self._loads.share_failures()
        for request in self._adapter.step.requests:
            if request.save_spec is not None and self._unfilled.spoil(request.slot_mapping):
                self._adapter.drop_store(request)
        self.layers.save_left_out()
        self._adapter.wait_for_save()

    def arrived(self) -> set[str]:
        """Return the requests that have all that they waited for; see `LoadQueue.move`."""
        requests, step = self.queue.move(), self._adapter.step
        if not requests and step is not None and step.tokens == 0 and self.queue.fetching:
            # Nobody computes, and vLLM asks again at once where its engine is in the caller's
            # process. The thread that fetches would wait milliseconds for each turn.
            time.sleep(IDLE_S)
        return requests

    def take_unfilled(self) -> set[int]:
        """Return the blocks that loads left unfilled since the last call; vLLM recomputes them."""
        self._loads.end(self.in_flight)  # vLLM may ask before it calls wait_for_save
        return self._unfilled.take()

    def _forget_entries(self) -> bool:
        if self.in_flight is not None:
            self.in_flight.drain()  # what is under way is published first, to be forgotten with it
        return health.forget_entries(self._engine)

    # What vLLM and the scheduler's half are told

    def report(self) -> WorkerReport | None:
        """Return what has changed in this worker since the last call, and which step has ended."""
        tiers = None
        if self.residency is not None and (changes := self.residency.take()):
            workers, shards = health.parts(self._adapter)
            tiers = TierReport(workers, changes, shards)
        step = None if self._adapter.step is None else self._adapter.step.number
        report = WorkerReport(tiers, self.epoch.changed, self.queue.take_speeds(), step)
        return None if report == NOTHING else report

    def near_engine(self) -> Any:
        """Return LMCache's engine, which knows its pins; None with a tier on another host."""
        config = self._adapter.config
        return None if config.remote_storage_plugins or config.remote_url else self._engine

    def shutdown(self) -> None:
        """End what LMCache has started, see `ending`. What is queued for the disk gets there."""
        self.queue.close()
        self.epoch.end()
        if self.in_flight is not None:
            self.in_flight.close()
        self.collection.allow()
        end_lmcache(self._adapter)
