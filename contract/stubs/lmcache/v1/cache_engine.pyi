from typing import Any

class LMCacheEngine:
    config: Any
    metadata: Any
    storage_manager: Any
    gpu_connector: Any
    lookup_pins: Any
    def lookup_unpin(self, lookup_id): ...
    def is_healthy(self): ...
    def mark_init_failed(self, reason=...): ...
    num_layers: Any
    use_layerwise: Any
    save_only_first_rank: Any
    def __init__(
        self, config, metadata, token_database, gpu_connector, broadcast_fn, broadcast_object_fn
    ): ...
    def lookup(
        self,
        tokens=...,
        hashes=...,
        offsets=...,
        search_range=...,
        lookup_id=...,
        pin=...,
        request_configs=...,
    ): ...
    def retrieve_layer(self, tokens, mask=..., **kwargs): ...
    def store(self, tokens=..., hashes=..., offsets=..., mask=..., **kwargs): ...
    def store_layer(self, tokens, mask=..., **kwargs): ...
