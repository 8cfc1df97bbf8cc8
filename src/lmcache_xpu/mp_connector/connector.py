"""The name by which vLLM loads the connector to LMCache's server; see `lmcache_connector`.

vLLM imports this file early, to ask the class questions, and its CPU worker then looks through
every loaded module in a way that fails on one which LMCache brings. So LMCache is imported when a
connector is made, which is LMCache's by subclass, and not of this class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA

from lmcache_xpu.kv_connector.stats import StatsHooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["LMCacheXPUServerConnector"]


@SupportsHMA.register  # it makes those that are
class LMCacheXPUServerConnector(StatsHooks):
    """Makes a `ServerConnector`, whose errors are raised here.

    It takes the blocks of all KV cache groups, so vLLM's hybrid manager stays on.
    """

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> Any:
        """Make the connector of one half."""
        from lmcache_xpu.mp_connector.lmcache_connector import ServerConnector

        return ServerConnector(vllm_config, role, kv_cache_config)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        raise NotImplementedError  # vLLM looks at its parameters

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: we read any layout."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: nothing is waited for between layers."""
        return False
