"""vLLM's KV connector: each hook goes to the scheduler's half or to a worker's.

Reached as `kv_connector` name `LMCacheXPUConnector` (or by LMCache's stock name), or by
`kv_connector_module_path` `lmcache_xpu.vllm_connector`. vLLM makes one in the scheduler's process
and one in each worker.

LMCache is imported only when a connector is made, and so are the halves. vLLM imports this file
earlier, to ask the class questions, and its CPU worker then looks through every loaded module in a
way that fails on one which LMCache brings (llvmlite's, by way of numba).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu import versions
from lmcache_xpu.cache_engine import config as lmcache_config
from lmcache_xpu.cache_engine.ending import end_with_process
from lmcache_xpu.cache_engine.kv_cache_facts import check_chunks, check_model, engine_facts
from lmcache_xpu.kv_connector import patches, stats
from lmcache_xpu.kv_connector.failures import ending_on_failure
from lmcache_xpu.kv_connector.kv_events import published
from lmcache_xpu.kv_connector.orphans import end_with_parent
from lmcache_xpu.kv_connector.request_guard import guarded
from lmcache_xpu.kv_connector.stats import StatsHooks
from lmcache_xpu.kv_connector.worker_report import WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_xpu.kv_connector.scheduler import SchedulerSide
    from lmcache_xpu.kv_connector.step_metadata import StepMetadata
    from lmcache_xpu.kv_connector.worker import WorkerSide


class LMCacheXPUConnector(StatsHooks, KVConnectorBase_V1):  # type: ignore[misc]  # untyped base
    """LMCache in process, with the parts of this package.

    On devices that are not served (see `patches.served_devices`) the constructor returns vLLM's
    connector for LMCache instead, with LMCache's own parts.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions.
        SettingsError: LMCache's configuration can't be served.
        LayoutError: the engine's KV cache can't be served.
        SeamError: LMCache did not come up with our connector. (LMCache alone would go on
            without a cache, each request waiting for a time-out.)
    """

    scheduler_side: SchedulerSide  # one of the two, by the role
    worker_side: WorkerSide

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
        if _served():
            check_model(vllm_config)
        return None

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> Any:
        """Make the connector for the platform's device; see the class."""
        if _served():
            return super().__new__(cls)
        return LMCacheConnectorV1(vllm_config, role, kv_cache_config)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        end_with_parent()
        versions.check(versions.installed())
        patches.install()
        # All that can be refused is refused before LMCache starts its threads.
        config = lmcache_config.prepare(vllm_config)
        check_model(vllm_config)
        facts = engine_facts(vllm_config, kv_cache_config)
        check_chunks(
            facts, chunk_size=config.chunk_size, save_unfull_chunk=config.save_unfull_chunk
        )
        super().__init__(vllm_config, role, kv_cache_config)
        publishes = published(vllm_config, config.enable_kv_events)
        self._ended = False
        with ending_on_failure():
            from lmcache_xpu.kv_connector.start import start_scheduler, start_worker

            engine = vllm_config, kv_cache_config, facts
            if role == KVConnectorRole.WORKER:
                self._lmcache_engine, self.worker_side = start_worker(*engine, publishes=publishes)
            else:
                self._lmcache_engine, self.scheduler_side = start_scheduler(
                    *engine, publishes=publishes
                )
        end_with_process(self)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a chunk that was not stored is computed again, whatever `kv_role` says."""
        return False

    def shutdown(self) -> None:
        """End what LMCache has started, see `ending`; may be called again.

        What is queued for the disk gets there.
        """
        if not self._ended:
            self._ended = True
            (
                self.worker_side if self._role is KVConnectorRole.WORKER else self.scheduler_side
            ).shutdown()

    # The worker's half, called by vLLM's model runner

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache; see `WorkerSide.register`."""
        with ending_on_failure():
            self.worker_side.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Let the engine wait before it writes blocks that stores still read."""
        self.worker_side.protect(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """End a step."""
        super().clear_connector_metadata()
        self.worker_side.clear()

    def has_connector_metadata(self) -> bool:
        """Whether vLLM is to come to us at the layers of this step; it asks at each of them."""
        return not self.worker_side.layers.quiet and super().has_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step needs, if that has not begun."""
        self.worker_side.start_load(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        self.worker_side.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Store a layer whose attention is enqueued."""
        self.worker_side.save_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        """Store what this step computed, but not from a failed load."""
        self.worker_side.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """No stores, and the requests that have all that they have waited for."""
        return None, self.worker_side.arrived() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load left unfilled since the last call; vLLM recomputes them."""
        return self.worker_side.take_unfilled()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call. The scheduler's half counts nothing."""
        return stats.take() if self._role is KVConnectorRole.WORKER else None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What has changed in this worker since the last call: its tiers, its weights."""
        return self.worker_side.report()

    # The worker's half, called by `worker_hooks`

    def begin_step(self, connector_metadata: StepMetadata) -> None:
        """Load what a step needs while vLLM prepares it."""
        if self.worker_side.begin_step(connector_metadata):
            super().bind_connector_metadata(connector_metadata)

    def end_enqueueing(self) -> None:
        """Collect garbage again: the device has work."""
        self.worker_side.collection.allow()

    def change_weights(self) -> None:
        """The weights are about to change: nothing is loaded or stored until another epoch."""
        self.worker_side.epoch.change_weights()

    # The scheduler's half

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether in background."""
        with guarded("get_num_new_matched_tokens"):
            return self.scheduler_side.matched_tokens(request, num_computed_tokens)
        self.scheduler_side.compute(request.request_id)
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step, or waits for its load."""
        with guarded("update_state_after_alloc"):
            return self.scheduler_side.allocated(request, blocks, num_external_tokens)
        return self.scheduler_side.fail(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers must know of a step."""
        with guarded("build_connector_meta"):
            return self.scheduler_side.describe(scheduler_output)
        return self.scheduler_side.describe_failed(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        with guarded("request_finished"):
            return self.scheduler_side.finished(request, block_ids)
        return False, None

    def reset_cache(self) -> bool | None:
        """Let nothing be found any more that was stored before; see `epochs`.

        Returns:
            False if the room of what was stored could not be given back.
        """
        return self.scheduler_side.reset()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        self.scheduler_side.bind(gpu_block_pool)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        report = connector_output.kv_connector_worker_meta
        arrived = connector_output.finished_recving or ()
        self.scheduler_side.end_step(report if isinstance(report, WorkerReport) else None, arrived)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events of the tiers since the last call; see `kv_events`."""
        return self.scheduler_side.take_events()

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tiers supply a request's tokens, as far as this process knows."""
        sources: dict[CacheHitSource, int] = super().get_external_cache_hit_sources(
            request, num_external_tokens
        )
        if not sources:
            return sources
        return self.scheduler_side.hit_sources(request.request_id, num_external_tokens) or sources

    def give_up_hits(self, request_id: str) -> None:
        """A load of this request failed: from now on it is computed; see `failed_loads`."""
        self.scheduler_side.give_up_hits(request_id)


def _served() -> bool:
    """Whether the platform's device is served."""
    from vllm.platforms import current_platform

    return current_platform.device_type in patches.served_devices()
