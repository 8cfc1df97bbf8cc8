"""The module path by which users' settings of vLLM name the connectors."""

from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from lmcache_xpu.mp_connector.connector import LMCacheXPUServerConnector

__all__ = ["LMCacheXPUConnector", "LMCacheXPUServerConnector"]
