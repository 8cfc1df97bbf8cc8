from typing import Any

class VllmServiceFactory:
    lmcache_config: Any
    lmcache_engine: Any
    role: Any
    def __init__(self, lmcache_config, vllm_config, role): ...
