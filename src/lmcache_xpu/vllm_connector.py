"""The module path by which users' settings of vLLM name the connector."""

from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector

__all__ = ["LMCacheXPUConnector"]
