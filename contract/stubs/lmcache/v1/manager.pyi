from typing import Any

class LMCacheManager:
    def __init__(self, config, service_factory, connector=...): ...
    def start_services(self): ...
    def is_healthy(self): ...
    _init_failed_reason: Any
    _health_monitor: Any
    _runtime_plugin_launcher: Any
    _api_server: Any
    _offload_server: Any
    _lookup_server: Any
    _lookup_client: Any
    _lmcache_engine: Any
    _config: Any
