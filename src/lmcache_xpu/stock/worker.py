"""The worker's half of the connector: what LMCache is to load and store of a step, and its errors.

LMCache lets errors of a load or a store through to vLLM, where they end the engine. Here

    load    its blocks count as unfilled, and vLLM computes them again (see `unfilled_blocks`)
    store   nothing more is stored in this step; published layers of a chunk that misses others
            are taken back

What a step computes from unfilled blocks is not stored, on any rank.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU, loaded
from lmcache_xpu.stock import health
from lmcache_xpu.stock.scheduler import WeightsChanged
from lmcache_xpu.stock.unfilled_blocks import UnfilledBlocks, log_failure

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

    from lmcache_xpu.model.kv_cache_facts import EngineFacts
    from lmcache_xpu.stock.scheduler import Step

__all__ = ["StockWorker"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class StockWorker:
    """Called by vLLM's model runner, on the engine's thread.

    Args:
        lmcache: LMCache's half of a connector.
        facts: of the engine's KV cache.
        unfilled: the record of failed loads.
    """

    def __init__(self, lmcache: Any, facts: EngineFacts, unfilled: UnfilledBlocks) -> None:
        self._lmcache = lmcache
        self._engine: Any = lmcache.lmcache_engine
        health.check_healthy(self._engine is not None and self._engine.is_healthy())
        health.log_connector(self._engine, facts)
        lmcache.device = torch.device("cpu")  # slots are planned on the host, see `slots`
        self._unfilled = unfilled
        group = get_tp_group()
        self._ranks = group.cpu_group if group.world_size > 1 else None
        self._weights_changed = False
        self._requests: list[Any] = []  # LMCache's descriptions, of this step
        self._loads: list[Any] = []  # of these, what is to be loaded
        self._loading = False  # the step has loads, as on all ranks
        self._waited: set[str] = set()  # layers that LMCache knows of; it counts calls
        self._stored: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache; LMCache opens its tiers now.

        Args:
            kv_caches: one tensor for each layer, in the order in which vLLM computes them.

        Raises:
            LayoutError: a KV cache that can't be read.
            SeamError: LMCache or one of its tiers did not come up.
            SettingsError: another engine's; vLLM has one connector for all engines of a process.
        """
        if self._lmcache.kv_caches:
            raise SettingsError(
                "a second engine in the process of one that has a KV connector",
                "one at a time: vLLM has a single KV connector in a process",
                "End the first one (`del llm`, then `gc.collect()`), or leave "
                "VLLM_ENABLE_V1_MULTIPROCESSING at 1, which gives each engine a process.",
            )
        self._lmcache.register_kv_caches(kv_caches)
        health.check_healthy(self._engine.is_healthy())
        health.check_tiers(self._engine, self._lmcache.config)
        self._engine.gpu_connector.initialize_kvcaches_ptr(kvcaches=list(kv_caches.values()))
        if (memory := health.pool(self._engine)) is not None:
            self._engine.gpu_connector.pin(memory)

    # A step

    def begin_step(self, step: Step) -> None:
        """Begin a step: decide what of it is loaded and stored."""
        self._waited.clear()
        self._stored.clear()
        self._lmcache.layerwise_retrievers = []
        self._unfilled.begin_step(step.new_blocks)
        self._unfilled.add(step.unserved)
        for request_id in step.ended:
            self._engine.lookup_unpin(request_id)
        self._requests = step.lmcache.requests
        self._loads = [
            request
            for request in self._requests
            if request.load_spec is not None and request.load_spec.can_load
        ]
        self._loading = bool(self._loads)
        if self._weights_changed:
            self._refuse(self._requests)
        elif self._engine.use_layerwise:
            self._refuse_scattered()

    def _refuse(self, requests: list[Any]) -> None:
        self._unfilled.refuse(requests)
        self._loads = [request for request in self._loads if request.load_spec is not None]

    def _refuse_scattered(self) -> None:
        """Compute requests whose chunks lie in several tiers: LMCache loads layers from one.

        What the CPU tier has of them goes, so that the next look-up finds them in the other one.
        """
        for request in self._loads:
            tiers = dict(self._engine.lookup_pins.get(request.req_id, {}))
            if len(tiers) > 1:
                self._engine.lookup_unpin(request.req_id)
                self._engine.storage_manager.batched_remove(
                    tiers.get(health.POOL, []), [health.POOL]
                )
                self._refuse([request])

    def load(self, context: ForwardContext, arguments: dict[str, Any]) -> None:
        """Load what a step needs; layer by layer, begin to.

        LMCache skips the load if the context has no attention metadata, of which it reads nothing.
        But vLLM's newer model runner loads before it enters the step's context, and the scheduler
        counts the tokens as computed: the step would compute from whatever the blocks hold.

        Args:
            context: of the step, or an empty one.
            arguments: what vLLM passes beside it.
        """
        loaded("step", len(self._loads))
        attention = context.attn_metadata
        if attention is None and self._loads:
            context.attn_metadata = arguments.get("attn_metadata", {})
        try:
            self._lmcache.start_load_kv(context, **arguments)
        except Exception as error:
            self._fail_loads(error)
        finally:
            context.attn_metadata = attention

    def wait_for_layer(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of this step's loads."""
        if layer_name in self._waited or not self._lmcache.layerwise_retrievers:
            return
        self._waited.add(layer_name)
        try:
            self._lmcache.wait_for_layer_load(layer_name)
        except Exception as error:
            self._fail_loads(error)

    def _fail_loads(self, error: Exception) -> None:
        """Count all loads of this step as failed: LMCache does not say which one failed."""
        log_failure(LOAD_CPU, "Loads failed and are computed instead", error)
        self._lmcache.layerwise_retrievers = []
        self._refuse(self._loads)

    def save_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        """Store a layer whose attention is enqueued."""
        if layer_name in self._stored or not self._engine.use_layerwise:
            return
        self._stored.add(layer_name)
        self._withhold()
        try:
            self._lmcache.save_kv_layer(layer_name, kv_layer, attn_metadata)
        except Exception as error:
            self._fail_stores(error)

    def wait_for_save(self) -> None:
        """Store what this step computed, but not from blocks that a load left unfilled."""
        self._withhold()
        if self._ranks is not None and self._loading:
            # vLLM learns of a failure on another rank after this, too late for this rank's store.
            self._unfilled.share(self._ranks)
        for request in self._requests:
            if request.save_spec is not None and self._unfilled.spoil(request.slot_mapping):
                self._drop_store(request)
        try:
            self._lmcache.wait_for_save()
        except Exception as error:
            self._fail_stores(error)
            for request in self._requests:
                self._engine.lookup_unpin(request.req_id)

    def take_unfilled(self) -> set[int]:
        """Return the blocks that loads left unfilled since the last call; vLLM recomputes them."""
        self._withhold()  # vLLM may ask before it calls wait_for_save
        return self._unfilled.take()

    def _withhold(self) -> None:
        self._unfilled.add(self._lmcache.get_block_ids_with_load_errors())
        self._unfilled.withhold()

    def _fail_stores(self, error: Exception) -> None:
        log_failure(STORE_CPU, "Stores failed and are left out", error)
        for request in self._requests:
            if request.save_spec is not None:
                self._drop_store(request)

    def _drop_store(self, request: Any) -> None:
        """Store nothing of a request in this step; layers that are published are taken back.

        LMCache asks for a chunk's first layer alone, and would complete it with others.
        """
        request.save_spec.can_save = False
        store = self._lmcache._layerwise_save_storers.pop(request.req_id, None)
        if store is None:
            return
        store.close()
        tiers = self._engine.storage_manager
        for _, _, key in self._engine.token_database.process_tokens(tokens=request.token_ids):
            layers = key.split_layers(self._engine.num_layers)
            if not all(map(tiers.contains, layers)):
                tiers.batched_remove(layers)

    def change_weights(self) -> None:
        """Load and store nothing from now on."""
        self._weights_changed = True

    def report(self) -> WeightsChanged | None:
        """Return what the scheduler must know after a step."""
        return WeightsChanged() if self._weights_changed else None
