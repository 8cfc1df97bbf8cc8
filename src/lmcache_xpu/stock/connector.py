"""vLLM's connector to LMCache's own engine, with the GPU connectors of this package.

vLLM makes one in its scheduler and one in each worker. LMCache and the halves are imported only
then: vLLM imports this file earlier, to ask the class questions, and its CPU worker then looks
through every loaded module in a way that fails on one which LMCache brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu import versions
from lmcache_xpu.connector.request_guard import guarded
from lmcache_xpu.connector.stats import StatsHooks
from lmcache_xpu.model.kv_cache_facts import check_chunks, check_model, engine_facts
from lmcache_xpu.stock import config as lmcache_config
from lmcache_xpu.vllm_hooks import patches
from lmcache_xpu.vllm_hooks.process_end import end_with_parent, ending_on_failure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_xpu.stock.scheduler import Step, StockScheduler, WeightsChanged
    from lmcache_xpu.stock.worker import StockWorker

__all__ = ["LMCacheXPUConnector"]


class LMCacheXPUConnector(StatsHooks, LMCacheConnectorV1):  # type: ignore[misc]  # untyped base
    """LMCache in process, moving KV with this package's connectors.

    On devices that are not served (see `patches.served_devices`) it makes vLLM's connector for
    LMCache instead, with LMCache's own parts.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions.
        SettingsError: LMCache's configuration or the model can't be served.
        LayoutError: the engine's KV cache can't be served.
        SeamError: LMCache did not come up with our connector. (LMCache alone would go on
            without a cache, each request waiting for a time-out.)
    """

    scheduler: StockScheduler  # one of the two, by the role
    worker: StockWorker

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether LMCache works layer by layer: a full graph calls nobody between layers."""
        return lmcache_config.use_layerwise(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: we read any layout. Models with states are refused here, before vLLM fails on them.

        Raises:
            SettingsError: a model that can't be served.
        """
        if _served():
            check_model(vllm_config)
        return None

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> Any:
        """Make the connector for the platform's device."""
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
        check_model(vllm_config, layerwise=config.use_layerwise)
        facts = engine_facts(vllm_config, kv_cache_config)
        check_chunks(
            facts, chunk_size=config.chunk_size, save_unfull_chunk=config.save_unfull_chunk
        )
        self._ended = False
        # vLLM's constructor looks for LMCache's half where LMCache before 0.5.7 had it.
        super(LMCacheConnectorV1, self).__init__(vllm_config, role, kv_cache_config)
        self._kv_cache_events = None
        with ending_on_failure():
            from lmcache_xpu.stock.ending import end_with_process
            from lmcache_xpu.versions.lmcache import LMCacheConnectorV1Impl

            if role is KVConnectorRole.WORKER:
                from lmcache_xpu.stock.gpu_connectors import making
                from lmcache_xpu.stock.unfilled_blocks import UnfilledBlocks
                from lmcache_xpu.stock.worker import StockWorker

                unfilled = UnfilledBlocks(facts.block_size)
                with making(facts, unfilled):
                    self._lmcache_engine = LMCacheConnectorV1Impl(vllm_config, role, self)
                self.worker = StockWorker(self._lmcache_engine, facts, unfilled)
            else:
                from lmcache_xpu.stock.scheduler import StockScheduler

                self._lmcache_engine = LMCacheConnectorV1Impl(vllm_config, role, self)
                self.scheduler = StockScheduler(self._lmcache_engine, facts.block_size)
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
            from lmcache_xpu.stock.ending import end_lmcache

            self._ended = True
            end_lmcache(self._lmcache_engine)

    # The worker's half, called by vLLM's model runner

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache; see `StockWorker.register`."""
        with ending_on_failure():
            self.worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata.lmcache)
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step needs; layer by layer, begin to."""
        self.worker.load(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        self.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Store a layer whose attention is enqueued."""
        self.worker.save_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        """Store what this step computed, but not from a failed load."""
        self.worker.wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load left unfilled since the last call; vLLM recomputes them."""
        return self.worker.take_unfilled()

    def build_connector_worker_meta(self) -> WeightsChanged | None:
        """Whether this worker's weights have changed."""
        return self.worker.report()

    def change_weights(self) -> None:
        """The weights are about to change: from now on nothing is loaded or stored."""
        self.worker.change_weights()

    # The scheduler's half

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has."""
        with guarded("get_num_new_matched_tokens"):
            return self.scheduler.matched_tokens(request, num_computed_tokens), False
        self.scheduler.give_up_hits(request.request_id)
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step."""
        with guarded("update_state_after_alloc"):
            return self.scheduler.allocated(request, blocks, num_external_tokens)
        return self.scheduler.give_up_hits(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """What the workers must know of a step."""
        with guarded("build_connector_meta"):
            return self.scheduler.describe(scheduler_output)
        return self.scheduler.describe_failed(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        with guarded("request_finished"):
            return self.scheduler.finished(request, block_ids)
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        super().update_connector_output(connector_output)
        if connector_output.kv_connector_worker_meta is not None:
            self.scheduler.stop("the engine's weights have changed")

    def reset_cache(self) -> bool | None:
        """Find and store nothing any more: LMCache's keys are the same before and after."""
        if self._role is KVConnectorRole.SCHEDULER:
            self.scheduler.stop("the cache was reset")
        return True

    def give_up_hits(self, request_id: str) -> None:
        """A load of this request failed: from now on it is computed; see `scheduler`."""
        self.scheduler.give_up_hits(request_id)


def _served() -> bool:
    """Whether the platform's device is served."""
    from vllm.platforms import current_platform

    return current_platform.device_type in patches.served_devices()
