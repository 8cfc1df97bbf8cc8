"""The module path by which users' settings of vLLM name the connectors, and a scheduler."""

from lmcache_xpu.connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.stock.connector import LMCacheXPUConnector
from lmcache_xpu.vllm_hooks.scheduler import LMCacheXPUScheduler

__all__ = ["LMCacheXPUConnector", "LMCacheXPUScheduler", "LMCacheXPUServerConnector"]
