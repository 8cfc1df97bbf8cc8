from typing import Any

class LMCacheManager:
    def __init__(self, config, service_factory, connector=...): ...
    def is_healthy(self): ...
    _lmcache_engine: Any
    _config: Any
