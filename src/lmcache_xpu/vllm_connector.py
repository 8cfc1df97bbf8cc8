"""The module path by which users' settings of vLLM name the connectors, and a scheduler."""

from lmcache_xpu.mp_connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.mp_connector.scheduler import LMCacheXPUScheduler
from lmcache_xpu.stock.connector import LMCacheXPUConnector

__all__ = ["LMCacheXPUConnector", "LMCacheXPUScheduler", "LMCacheXPUServerConnector"]
