"""What both halves of the connector share: vLLM's class around LMCache's half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu.errors import SeamError
from lmcache_xpu.versions.lmcache import LMCacheConnectorV1Impl

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class StockHalf(LMCacheConnectorV1):  # type: ignore[misc]  # untyped base
    """A connector of one role; `lmcache` is LMCache's half, which does the work.

    Raises SeamError if LMCache did not come up, of which it only logs why.
    """

    ROLE: KVConnectorRole
    NEEDS: str  # the part of LMCache's half that looks up or stores

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        # vLLM's constructor looks for LMCache's half where LMCache before 0.5.7 had it.
        super(LMCacheConnectorV1, self).__init__(vllm_config, self.ROLE, kv_cache_config)
        self._kv_cache_events = None
        self.lmcache: Any = LMCacheConnectorV1Impl(vllm_config, self.ROLE, self)
        self._lmcache_engine = self.lmcache
        if getattr(self.lmcache, self.NEEDS) is None:
            raise SeamError(
                "LMCache without a cache", "LMCache up", "Its error is in the log above."
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a chunk that was not stored is computed again, whatever `kv_role` says."""
        return False

    def shutdown(self) -> None:
        """Leave LMCache's look-ups as they are: its end of them ends what the process shares."""
