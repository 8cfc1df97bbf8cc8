"""The worker's half of the connector: what LMCache may load and store of a step, and its errors.

LMCache lets errors of a load or a store through to vLLM, where they end the engine. Here vLLM is
told of the blocks of a load that failed, and computes them; with asynchronous scheduling one more
step is on its way then, and neither of the two stores anything. After a store that failed nothing
more is stored in its step. A step that loads layer by layer stores when all layers are there.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_xpu.errors import SeamError
from lmcache_xpu.stock.gpu_connectors import log_failure, making
from lmcache_xpu.stock.half import StockHalf
from lmcache_xpu.transfer.slots import blocks_of
from lmcache_xpu.vllm_hooks.process_end import ending_on_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_xpu.model.kv_cache_facts import EngineFacts

POOL = "LocalCPUBackend"
WITHHELD_STEPS = 2  # of a failure: its own, and the one that vLLM had scheduled by then


class StockWorker(StockHalf):
    """Called by vLLM's model runner; its methods are vLLM's, where nothing else is said."""

    ROLE, NEEDS = KVConnectorRole.WORKER, "lmcache_engine"

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, facts: EngineFacts
    ) -> None:
        with making(facts):
            super().__init__(vllm_config, kv_cache_config)
        self.block_size = facts.block_size
        self.lmcache.device = torch.device("cpu")  # slots are planned on the host
        self.engine: Any = self.lmcache.lmcache_engine
        self.requests: list[Any] = []  # LMCache's descriptions, of this step
        self.loads: list[Any] = []  # of these, what is to be loaded
        self.failed: set[int] = set()  # blocks that vLLM is not told of yet
        self.withheld = 0  # steps that store nothing, this one included
        self.waited: set[str] = set()  # layers that LMCache knows of; it counts calls
        self.stored: set[str] = set()
        # Python waits for LMCache's threads before it runs what `atexit` knows.
        threading._register_atexit(self.shutdown)  # type: ignore[attr-defined]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache, by layers in their order; LMCache opens its tiers now.

        Raises LayoutError, and SeamError if a tier did not come up, of which LMCache only logs why.
        """
        with ending_on_failure():
            self.lmcache.register_kv_caches(kv_caches)
            tiers = self.engine.storage_manager.storage_backends if self.engine.is_healthy() else {}
            for tier in (POOL, *(self.lmcache.config.storage_plugins or ())):
                if tier not in tiers:
                    raise SeamError(
                        f"LMCache tiers {list(tiers)}",
                        f"the configured tier {tier!r} among them, and working",
                        "Its error is in the log above, after 'Failed to'.",
                    )
            self.engine.gpu_connector.initialize_kvcaches_ptr(kvcaches=list(kv_caches.values()))
            self.engine.gpu_connector.pin(tiers[POOL].memory_allocator.buffer)

    # A step

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step with LMCache's descriptions of what its requests load and store."""
        super().bind_connector_metadata(connector_metadata)
        self.requests = connector_metadata.requests
        self.loads = [each for each in self.requests if each.load_spec and each.load_spec.can_load]
        self.withheld = max(0, self.withheld - 1)
        self.waited.clear()
        self.stored.clear()
        self.lmcache.layerwise_retrievers = []
        if not self.engine.is_healthy():
            self.withheld = WITHHELD_STEPS
            self._refuse(self.loads)
        for request in self.loads if self.engine.use_layerwise else ():
            # LMCache loads layers from one tier. What the CPU tier has of a request goes, so that
            # the next look-up finds it in the other one.
            tiers = dict(self.engine.lookup_pins.get(request.req_id, {}))
            if request.load_spec and len(tiers) > 1:
                self.engine.lookup_unpin(request.req_id)
                self.engine.storage_manager.batched_remove(tiers.get(POOL, []), [POOL])
                self._refuse([request])

    def _refuse(self, requests: list[Any]) -> None:
        """Load nothing of requests: their blocks count as failed."""
        for request in requests:
            spec, request.load_spec = request.load_spec, None
            slots = request.slot_mapping[spec.vllm_cached_tokens : spec.lmcache_cached_tokens]
            self._fail(blocks_of(slots, self.block_size))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what a step needs; layer by layer, begin to.

        LMCache skips the load if the context has no attention metadata, of which it reads nothing.
        But vLLM's newer model runner loads before it enters the step's context, and the scheduler
        counts the tokens as computed: the step would compute from whatever the blocks hold.
        """
        attention = forward_context.attn_metadata
        if attention is None and self.loads:
            forward_context.attn_metadata = kwargs.get("attn_metadata", {})
        try:
            self.lmcache.start_load_kv(forward_context, **kwargs)
        except Exception as error:
            self._fail_loads(error)
        finally:
            forward_context.attn_metadata = attention

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of this step's loads."""
        if layer_name in self.waited or not self.lmcache.layerwise_retrievers:
            return
        self.waited.add(layer_name)
        try:
            self.lmcache.wait_for_layer_load(layer_name)
        except Exception as error:
            self._fail_loads(error)

    def _fail_loads(self, error: Exception) -> None:
        """Count all loads of this step as failed: LMCache does not say which one failed."""
        log_failure("Loads failed and are computed instead", error)
        self.lmcache.layerwise_retrievers = []
        self._refuse([each for each in self.loads if each.load_spec is not None])

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Store a layer whose attention is enqueued, in a step without loads."""
        if self.engine.use_layerwise and not self.loads:
            self._store_layer(layer_name)

    def _store_layer(self, layer_name: str) -> None:
        if layer_name not in self.stored and not self.withheld:
            self.stored.add(layer_name)
            self._store(lambda: self.lmcache.save_kv_layer(layer_name, None, None))

    def wait_for_save(self) -> None:
        """Store what this step computed, unless a load has failed; take look-ups' pins back."""
        self._take_failures()
        for layer_name in self.lmcache.kv_caches if self.engine.use_layerwise else ():
            self._store_layer(layer_name)
        if not self.withheld:
            self._store(self.lmcache.wait_for_save)
        self.get_finished({request.req_id for request in self.requests})

    def _store(self, store: Callable[[], None]) -> None:
        """Store; after an error, let LMCache forget the stores of this step that have begun."""
        try:
            store()
        except Exception as error:
            log_failure("Stores failed and are left out", error)
            self.withheld = max(1, self.withheld)
            for _ in self.requests if self.engine.use_layerwise else ():
                with suppress(Exception):  # each call forgets one at least
                    self.lmcache.wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks, by their IDs, whose loads have failed since the last call."""
        self._take_failures()  # vLLM may ask before it calls wait_for_save
        blocks, self.failed = self.failed, set()
        return blocks

    def _take_failures(self) -> None:
        self._fail(self.lmcache.get_block_ids_with_load_errors())
        while self.engine.gpu_connector.failed_slots:
            slots = self.engine.gpu_connector.failed_slots.pop()
            self._fail(blocks_of(slots, self.block_size))

    def _fail(self, blocks: set[int]) -> None:
        if blocks:
            self.failed |= blocks
            self.withheld = WITHHELD_STEPS

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """Take back the pins of look-ups of requests that have ended, also before any step."""
        for request_id in finished_req_ids:
            self.engine.lookup_unpin(request_id)
        return None, None

    def change_weights(self) -> None:
        """Load, store and look up nothing from now on: the weights are about to change."""
        self.engine.mark_init_failed(
            "the engine's weights have changed, and it looks up and stores nothing until it is "
            "restarted (docs: troubleshooting#stock-stopped)"
        )

    def shutdown(self) -> None:
        """End LMCache's tiers, once what is queued for the disk is there; may be called again.

        LMCache's own order would free the pool's memory first, from which the disk tier still
        writes; and it closes a socket that a thread of its own reads, which may abort the process.
        """
        manager = self.engine.storage_manager
        if manager is not None and manager.thread.is_alive():
            for name in self.lmcache.config.storage_plugins or ():
                manager.close_backend(name)
            manager.close()
