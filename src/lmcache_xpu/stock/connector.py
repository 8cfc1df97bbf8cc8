"""vLLM's connector to LMCache's own engine, with the GPU connectors of this package.

vLLM makes one in its scheduler and one in its worker. LMCache and the halves are imported only
then: vLLM imports this file earlier, to ask the class questions, and its CPU worker then looks
through every loaded module in a way that fails on one which LMCache brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu import versions
from lmcache_xpu.model.kv_cache_facts import check_chunks, check_model, engine_facts
from lmcache_xpu.stock.config import prepare, use_layerwise
from lmcache_xpu.vllm_hooks import patches
from lmcache_xpu.vllm_hooks.process_end import end_with_parent, ending_on_failure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class LMCacheXPUConnector(LMCacheConnectorV1):  # type: ignore[misc]  # untyped base
    """Answers vLLM's questions, and makes the half of the connector that a role needs.

    On devices that are not served (see `patches.served_devices`) it makes vLLM's own.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions.
        SettingsError: LMCache's configuration or the model can't be served.
        LayoutError: the engine's KV cache can't be served.
        SeamError: LMCache did not come up with our connector, and would go on without a cache.
    """

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether LMCache works layer by layer: a full graph calls nobody between layers."""
        return use_layerwise(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: we read any layout. Models with states are refused, before vLLM fails on them."""
        if _served():
            check_model(vllm_config)
        return None

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> Any:
        """Make a half for the platform's device; what can be refused is, before LMCache starts."""
        if not _served():
            return LMCacheConnectorV1(vllm_config, role, kv_cache_config)
        end_with_parent()
        versions.check(versions.installed())
        patches.install()
        config = prepare(vllm_config)
        check_model(vllm_config, layerwise=config.use_layerwise)
        facts = engine_facts(vllm_config, kv_cache_config)
        check_chunks(
            facts, chunk_size=config.chunk_size, save_unfull_chunk=config.save_unfull_chunk
        )
        with ending_on_failure():
            if role is KVConnectorRole.SCHEDULER:
                from lmcache_xpu.stock.scheduler import StockScheduler

                return StockScheduler(vllm_config, kv_cache_config)
            from lmcache_xpu.stock.worker import StockWorker

            return StockWorker(vllm_config, kv_cache_config, facts)


def _served() -> bool:
    """Whether the platform's device is served."""
    from vllm.platforms import current_platform

    return current_platform.device_type in patches.served_devices()
