"""The module path by which users' settings of vLLM name the connectors, and a scheduler."""

from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from lmcache_xpu.mp_connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.mp_connector.scheduler import LMCacheXPUScheduler

__all__ = ["LMCacheXPUConnector", "LMCacheXPUScheduler", "LMCacheXPUServerConnector"]
