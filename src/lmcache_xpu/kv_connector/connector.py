"""vLLM's side: the LMCache connector that builds LMCache's engine with our connector inside.

Reached as `kv_connector` name `LMCacheXPUConnector` (or by LMCache's stock name), or by
`kv_connector_module_path` `lmcache_xpu.vllm_connector`. vLLM makes one in the scheduler's process
and one in each worker.

LMCache is imported only when a connector is made. vLLM imports this file earlier, to ask the class
questions, and its CPU worker then looks through every loaded module in a way that fails on one
which LMCache brings (llvmlite's, by way of numba).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger

from lmcache_xpu import versions
from lmcache_xpu.cache_engine import config as lmcache_config
from lmcache_xpu.cache_engine import health
from lmcache_xpu.cache_engine.ending import end_lmcache, end_with_process
from lmcache_xpu.cache_engine.engine import Guard
from lmcache_xpu.cache_engine.kv_cache_facts import (
    EngineFacts,
    check_chunks,
    check_model,
    engine_facts,
    promoted_windows,
)
from lmcache_xpu.cache_engine.lookup_keys import ChunkKeys
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import garbage, patches
from lmcache_xpu.kv_connector.epochs import Epoch, WorkerEpoch
from lmcache_xpu.kv_connector.failed_start import ending_on_failure
from lmcache_xpu.kv_connector.kv_events import KVEvents, published
from lmcache_xpu.kv_connector.reporting import ReportingConnector
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.step_metadata import STEP, may_run_as_one_graph, with_answers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_xpu.gpu_connector.in_flight import InFlight

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class LMCacheXPUConnector(ReportingConnector):
    """LMCache in process, with the connectors of this package.

    On devices that are not served (see `seam.served_devices`) it is LMCache's own connector.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions.
        SettingsError: LMCache's configuration can't be served.
        LayoutError: the engine's KV cache can't be served.
        SeamError: LMCache did not come up with our connector. (LMCache alone would go on
            without a cache, each request waiting for a time-out.)
    """

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether vLLM must call us between layers, which a full graph would not.

        Answered from the setting that LMCache will use: `lmcache.use_layerwise` in vLLM's extra
        configuration, else LMCACHE_USE_LAYERWISE, else the file LMCACHE_CONFIG_FILE.
        """
        return lmcache_config.use_layerwise(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: we read any layout. vLLM asks before it sorts the layers into groups.

        That fails for models with states, before a connector is made that could say why.

        Raises:
            SettingsError: a model that can't be served.
        """
        from vllm.platforms import current_platform

        if current_platform.device_type in patches.served_devices():
            check_model(vllm_config)
        return None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        from vllm.platforms import current_platform

        self._served = current_platform.device_type in patches.served_devices()
        self._facts: EngineFacts | None = None
        self._overlap: InFlight | None = None
        self._layers: dict[str, int] = {}
        self._loaded_layers: set[str] = set()  # that the engine came to in this step
        self._stored_layers: set[str] = set()  # that it is done with
        self._ended = False
        self._loading = False  # this step's loads have begun
        self._loads_early = False  # before vLLM has prepared the step
        self._guard: Guard | None = None  # the worker's
        self._keys: ChunkKeys | None = None  # the worker's, in standard mode
        self._epoch: WorkerEpoch | None = None  # the worker's
        self._scheduler: SchedulerSide | None = None
        if not self._served:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        versions.check(versions.installed())
        patches.install()
        # All that can be refused is refused before LMCache starts its threads.
        self._config = lmcache_config.load()
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config = extra = transfer.kv_connector_extra_config or {}
        lmcache_config.apply(self._config, extra)
        lmcache_config.check_features(self._config, extra)
        lmcache_config.set_apart(self._config, extra, vllm_config.parallel_config)
        lmcache_config.make_hash_safe(self._config, extra)
        check_model(vllm_config)
        if vllm_config.model_config.use_mla:
            workers = vllm_config.parallel_config.world_size
            lmcache_config.keep_own_copies(self._config, extra, workers=workers)
        facts = engine_facts(vllm_config, kv_cache_config)
        # Where vLLM zeroes new blocks, it does so while it prepares a step.
        self._loads_early = not kv_cache_config.needs_kv_cache_zeroing
        check_chunks(
            facts,
            chunk_size=self._config.chunk_size,
            save_unfull_chunk=self._config.save_unfull_chunk,
        )
        with ending_on_failure():
            if role == KVConnectorRole.WORKER:
                health.limit_pinning(torch.device(facts.device_type))
            with patches.building(facts):
                super().__init__(vllm_config, role, kv_cache_config)
            # Slots are planned on the host (see `slots`); LMCache would send them to the device.
            self._lmcache_engine.device = torch.device("cpu")
            self._facts = facts
            health.check_healthy(self._lmcache_engine)
            self._publishes = published(vllm_config, self._config.enable_kv_events)
            if role == KVConnectorRole.WORKER:
                health.check_connector(self._lmcache_engine, facts)
                # LMCache's own events name tokens that `isolation` exchanged; see `kv_events`.
                self._lmcache_engine.lmcache_engine.kv_events_enabled = False
                if not self._config.use_layerwise:
                    self._keys = ChunkKeys(self._lmcache_engine.lmcache_engine)
                self._guard = Guard(self._lmcache_engine, facts.block_size)
                engine = self._lmcache_engine.lmcache_engine
                self._epoch = WorkerEpoch(engine, self._guard, self._forget_entries)
            else:
                self._scheduler = SchedulerSide(self._lmcache_engine, vllm_config, facts.block_size)
                if windows := promoted_windows(vllm_config, kv_cache_config):
                    logger.warning("%s.", windows.note)
                if self._publishes:
                    database = getattr(self._lmcache_engine.lookup_client, "token_database", None)
                    self._scheduler.events = KVEvents(database, facts.block_size, kv_cache_config)
        end_with_process(self)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache; LMCache opens its tiers now.

        Raises:
            LayoutError: a KV cache that can't be read.
            SeamError: LMCache or one of its tiers did not come up.
            SettingsError: another engine's; vLLM has one connector for all engines of a process.
        """
        if not self._served:
            super().register_kv_caches(kv_caches)
            return
        if self._overlap is not None:
            raise SettingsError(
                "a second engine in the process of one that has a KV connector",
                "one at a time: vLLM has a single KV connector in a process",
                "End the first one (`del llm`, then `gc.collect()`), or leave "
                "VLLM_ENABLE_V1_MULTIPROCESSING at 1, which gives each engine a process.",
            )
        with ending_on_failure():
            super().register_kv_caches(kv_caches)
            health.check_healthy(self._lmcache_engine)
            engine = self._lmcache_engine.lmcache_engine
            engine.gpu_connector.initialize_kvcaches_ptr(kvcaches=list(kv_caches.values()))
            if (pool := health.pool(engine)) is not None:
                engine.gpu_connector.pin(pool)
            self._run_beside(engine, kv_caches)
            health.check_tiers(engine, self._config)
            if self._publishes:
                self._residency = health.watch_tiers(engine, self._config)

    def begin_step(self, connector_metadata: KVConnectorMetadata) -> None:
        """Load what a step needs while vLLM prepares it, which takes milliseconds.

        Called first in each step (see `seam`); vLLM itself asks when it is ready to compute.
        """
        if not (self._served and self._loads_early):
            return
        self.bind_connector_metadata(connector_metadata)
        if self._loads_in_step():
            garbage.put_off()  # until the step is enqueued (see `seam`)
            self._loading = True
            super().start_load_kv(SimpleNamespace(attn_metadata={}))

    def near_engine(self) -> Any:
        """LMCache's engine, to be asked for chunks by a call; None with a tier on another host."""
        far = self._config.remote_storage_plugins or self._config.remote_url
        return None if far else self._lmcache_engine.lmcache_engine

    def begin_load(self, metadata: Any, written: frozenset[int], tokens: int) -> bool:
        """Begin a load of the next step, while that is being decided on; see `scheduled_loads`.

        Args:
            metadata: LMCache's, of one request.
            written: blocks that are loaded.
            tokens: of the request that remain to be computed.
        """
        if self._overlap is None or not (self._overlap.loads and self._loads_early):
            return False
        # LMCache begins the layerwise loads of a step together; and a step may be under way.
        if self._keys is None or self.has_connector_metadata():
            return False
        if self.weights_changed is not None:
            return False  # the step's description is looked at more closely
        self._overlap.schedule(written, tokens)
        super().bind_connector_metadata(metadata)
        try:
            with self._keys.pinned():
                super().start_load_kv(SimpleNamespace(attn_metadata={}))
        finally:
            self.clear_connector_metadata()
        return True

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. Blocks that it may write wait for stores that still read them."""
        if self.has_connector_metadata() and self._get_connector_metadata() is connector_metadata:
            return  # again would forget layerwise loads that have begun
        super().bind_connector_metadata(connector_metadata)
        self._loading = False
        written, tokens = getattr(connector_metadata, STEP, (None, None))
        self._loaded_layers.clear()
        self._stored_layers.clear()
        if self._guard is not None:
            self._guard.begin_step(written)
        if self._epoch is not None:
            self._epoch.begin_step(connector_metadata)
        if self._overlap is not None:
            self._overlap.begin_step(written, tokens)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before vLLM may write blocks that stores still read, e.g. to zero them.

        vLLM calls it first in each step, also through a MultiConnector, which `begin_step` is not.
        The engine's stream waits; this thread does not.
        """
        if self._overlap is not None:
            self._overlap.protect(getattr(kv_connector_metadata, STEP, (None, None))[0])

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step needs, if that has not begun; see LMCache's connector.

        vLLM's newer model runner loads before it enters a forward context where the step is one
        graph (up to 0.26), or always (since). LMCache skips the load if the context has no
        attention metadata, though the scheduler counts its tokens as computed: the step would
        compute from whatever the blocks hold. It looks at nothing else of them.
        """
        if not self._loading:
            found = forward_context.attn_metadata
            if self._served and found is None and self._loads_in_step():
                forward_context.attn_metadata = kwargs.get("attn_metadata", {})
            try:
                super().start_load_kv(forward_context, **kwargs)
            finally:
                forward_context.attn_metadata = found
        if self._overlap is not None and may_run_as_one_graph(
            self._vllm_config, forward_context, kwargs
        ):
            self._overlap.before_all()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads.

        A drafter comes to its layers once for each token that it proposes. LMCache counts calls.
        """
        if layer_name in self._loaded_layers:
            return
        self._loaded_layers.add(layer_name)
        super().wait_for_layer_load(layer_name)  # of layerwise loads
        if self._overlap is not None:
            self._overlap.before_layer(self._layers[layer_name])

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """A layer's attention is enqueued; see LMCache's connector.

        A drafter's first time covers all that the step stores.
        """
        if layer_name in self._stored_layers:
            return
        self._stored_layers.add(layer_name)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        if self._overlap is not None:
            self._overlap.after_layer(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """Store what this step computed, but not from a failed load; see LMCache's connector."""
        self._end_loads()
        if self._guard is not None:
            self._guard.withhold(self._get_connector_metadata().requests)
        if self._stored_layers:
            # vLLM leaves its drafter out near the longest sequence. Without its layers a chunk
            # would never be complete; what they hold decides no token.
            for name in self._layers.keys() - self._stored_layers:
                super().save_kv_layer(name, None, None)
        super().wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load left unfilled since the last call; vLLM recomputes them."""
        self._end_loads()  # vLLM may ask before it calls wait_for_save
        failed = self._guard.take_unfilled() if self._guard is not None else set()
        reported: set[int] = super().get_block_ids_with_load_errors()
        return failed | reported

    def change_weights(self) -> None:
        """The weights are about to change: nothing is loaded or stored until another epoch."""
        if self._epoch is not None:
            self._epoch.change_weights()

    def begin_epoch(self, epoch: Epoch) -> bool:
        """Give back the room of what was stored before; False if something is still there."""
        return self._epoch is None or self._epoch.begin(epoch)

    # The scheduler's half

    def reset_cache(self) -> bool | None:
        """Let nothing be found any more that was stored before; see `epochs`.

        Returns:
            False if the room of what was stored could not be given back; None on devices that are
            not served, where LMCache resets nothing.
        """
        if self._scheduler is None:
            reset: bool | None = super().reset_cache()
            return reset
        return self._scheduler.reset()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has; see `isolation`."""
        if self._scheduler is not None:
            self._scheduler.admit(request, num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def give_up_hits(self, request_id: str) -> None:
        """A load of this request failed: from now on it is computed; see `failed_loads`."""
        if self._scheduler is not None:
            self._scheduler.give_up_hits(request_id)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers must know of a step; LMCache's, and which blocks it may write."""
        meta = super().build_connector_meta(with_answers(scheduler_output))
        if self._scheduler is not None:
            self._scheduler.describe(meta, scheduler_output)
        return meta

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        done: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return done

    def shutdown(self) -> None:
        """End what LMCache has started, see `ending`; may be called again.

        What is queued for the disk gets there.
        """
        if self._ended or not self._served:
            return
        self._ended = True
        if self._overlap is not None:
            self._overlap.drain()
        if self._epoch is not None:
            self._epoch.end()
        if self._overlap is not None:
            self._overlap.close()
        garbage.allow()
        end_lmcache(self._lmcache_engine)

    def _run_beside(self, engine: Any, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Let transfers run beside the engine, as far as the settings allow it."""
        from lmcache.integration.vllm.utils import calculate_draft_layers

        from lmcache_xpu.gpu_connector.in_flight import InFlight

        assert self._facts is not None
        extra = self._config.extra_config or {}
        loads, stores = (bool(extra.get(f"xpu.overlap_{way}", True)) for way in ("load", "store"))
        self._layers = {name: number for number, name in enumerate(kv_caches)}
        self._overlap = engine.gpu_connector.overlap = InFlight(
            block_tokens=self._facts.block_size,
            # vLLM makes the layers in the order in which it computes them, a drafter's last.
            model_layers=len(kv_caches) - calculate_draft_layers(self._vllm_config),
            loads=loads,
            stores=stores,
        )
        patches.publish_when_complete(engine.storage_manager, self._overlap)

    def _forget_entries(self) -> bool:
        if self._overlap is not None:
            self._overlap.drain()  # what is under way is published first, to be forgotten with it
        return health.forget_entries(self._lmcache_engine.lmcache_engine)

    def _loads_in_step(self) -> bool:
        specs = [request.load_spec for request in self._get_connector_metadata().requests]
        return any(spec is not None and spec.can_load for spec in specs)

    def _end_loads(self) -> None:
        if self._overlap is None:
            return
        # LMCache frees what a layerwise load took at its end, which is behind a drafter's layers.
        loads, self._lmcache_engine.layerwise_retrievers = (
            self._lmcache_engine.layerwise_retrievers,
            [],
        )
        for load in loads:
            deque(load, maxlen=0)
        if not (missed := self._overlap.end_step()):
            return
        logger.error(
            "vLLM computed without waiting for the KV cache of %d requests; they are recomputed",
            len(missed),
        )
        self._lmcache_engine.lmcache_engine.gpu_connector.failed_slots.extend(missed)
