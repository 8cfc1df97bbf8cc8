"""vLLM's side: the LMCache connector that builds LMCache's engine with our connector inside.

Reached as `kv_connector` name `LMCacheXPUConnector` (or by LMCache's stock name), or by
`kv_connector_module_path` `lmcache_xpu.vllm_connector`. vLLM makes one in the scheduler's process
and one in each worker.

LMCache is imported only when a connector is made. vLLM imports this file earlier, to ask the class
questions, and its CPU worker then looks through every loaded module in a way that fails on one
which LMCache brings (llvmlite's, by way of numba).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.logger import init_logger

from lmcache_xpu import garbage, lmcache_config, lmcache_engine, seam, versions
from lmcache_xpu.chunk_keys import ChunkKeys
from lmcache_xpu.ending import end_lmcache, end_with_process
from lmcache_xpu.engine_facts import EngineFacts, check_chunks, engine_facts
from lmcache_xpu.engine_steps import STEP, may_run_as_one_graph
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.failed_start import ending_on_failure
from lmcache_xpu.guards import Guard
from lmcache_xpu.scheduler_side import SchedulerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_xpu.overlap import Overlap

logger = init_logger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class LMCacheXPUConnector(LMCacheConnectorV1):  # type: ignore[misc]  # untyped base
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

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        from vllm.platforms import current_platform

        self._served = current_platform.device_type in seam.served_devices()
        self._facts: EngineFacts | None = None
        self._overlap: Overlap | None = None
        self._layers: dict[str, int] = {}
        self._ended = False
        self._loading = False  # this step's loads have begun
        self._loads_early = False  # before vLLM has prepared the step
        self._guard: Guard | None = None  # the worker's
        self._keys: ChunkKeys | None = None  # the worker's, in standard mode
        self._scheduler: SchedulerSide | None = None
        if not self._served:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        versions.check(versions.installed())
        seam.install()
        from lmcache.integration.vllm.utils import lmcache_get_or_create_config

        # All that can be refused is refused before LMCache starts its threads.
        self._config = lmcache_get_or_create_config()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        lmcache_config.apply(self._config, extra)
        lmcache_config.make_hash_safe(self._config, extra)
        facts = engine_facts(vllm_config, kv_cache_config)
        # Where vLLM zeroes new blocks, it does so while it prepares a step.
        self._loads_early = not kv_cache_config.needs_kv_cache_zeroing
        lmcache_config.check_features(self._config)
        check_chunks(
            facts,
            chunk_size=self._config.chunk_size,
            save_unfull_chunk=self._config.save_unfull_chunk,
        )
        with ending_on_failure():
            with seam.building(facts):
                super().__init__(vllm_config, role, kv_cache_config)
            # Slots are planned on the host (see `slots`); LMCache would send them to the device.
            self._lmcache_engine.device = torch.device("cpu")
            self._facts = facts
            lmcache_engine.check_healthy(self._lmcache_engine)
            if role == KVConnectorRole.WORKER:
                lmcache_engine.check_connector(self._lmcache_engine, facts)
                if not self._config.use_layerwise:
                    self._keys = ChunkKeys(self._lmcache_engine.lmcache_engine)
                self._guard = Guard(self._lmcache_engine, facts.block_size)
            else:
                self._scheduler = SchedulerSide(self._lmcache_engine, vllm_config, facts.block_size)
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
            lmcache_engine.check_healthy(self._lmcache_engine)
            engine = self._lmcache_engine.lmcache_engine
            engine.gpu_connector.initialize_kvcaches_ptr(kvcaches=list(kv_caches.values()))
            self._run_beside(engine, kv_caches)
            lmcache_engine.check_tiers(engine, self._config)

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
        if self._guard is not None:
            self._guard.begin_step()
        if self._overlap is not None:
            facts = getattr(connector_metadata, STEP, (None, None))
            self._overlap.begin_step(*facts)

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
        """Let the engine's stream wait for a layer of what this step loads."""
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
        """A layer's attention is enqueued; see LMCache's connector."""
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        if self._overlap is not None:
            self._overlap.after_layer(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """Store what this step computed, but not from a failed load; see LMCache's connector."""
        self._end_loads()
        if self._guard is not None:
            self._guard.withhold(self._get_connector_metadata().requests)
        super().wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load left unfilled since the last call; vLLM recomputes them."""
        self._end_loads()  # vLLM may ask before it calls wait_for_save
        failed = self._guard.take_unfilled() if self._guard is not None else set()
        reported: set[int] = super().get_block_ids_with_load_errors()
        return failed | reported

    # The scheduler's half

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has; see `isolation`."""
        if self._scheduler is not None:
            self._scheduler.admit(request)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers must know of a step; LMCache's, and which blocks it may write."""
        meta = super().build_connector_meta(scheduler_output)
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
        if self._overlap is not None:
            self._overlap.close()
        if self._served and not self._ended:
            self._ended = True
            garbage.allow()
            end_lmcache(self._lmcache_engine)

    def _run_beside(self, engine: Any, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Let transfers run beside the engine, as far as the settings allow it."""
        from lmcache_xpu.overlap import Overlap

        assert self._facts is not None
        extra = self._config.extra_config or {}
        loads, stores = (bool(extra.get(f"xpu.overlap_{way}", True)) for way in ("load", "store"))
        self._layers = {name: number for number, name in enumerate(kv_caches)}
        self._overlap = engine.gpu_connector.overlap = Overlap(
            block_tokens=self._facts.block_size, loads=loads, stores=stores
        )
        seam.publish_when_complete(engine.storage_manager, self._overlap)

    def _loads_in_step(self) -> bool:
        specs = [request.load_spec for request in self._get_connector_metadata().requests]
        return any(spec is not None and spec.can_load for spec in specs)

    def _end_loads(self) -> None:
        if self._overlap is None or not (missed := self._overlap.end_step()):
            return
        logger.error(
            "vLLM computed without waiting for the KV cache of %d requests; they are recomputed",
            len(missed),
        )
        self._lmcache_engine.lmcache_engine.gpu_connector.failed_slots.extend(missed)
