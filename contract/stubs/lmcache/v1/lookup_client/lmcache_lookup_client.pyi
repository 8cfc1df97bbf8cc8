from typing import Any

class LMCacheLookupClient:
    def clear_lookup_status(self, lookup_id): ...
    transport: Any
    token_database: Any
    def __init__(self, config, metadata, transport): ...
    def lookup(self, token_ids, lookup_id, request_configs=...): ...

class LMCacheLookupServer:
    running: Any
    thread: Any
    transport: Any
    def __init__(self, lmcache_engine, metadata, transport): ...
