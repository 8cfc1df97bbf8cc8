from typing import Any

class CacheEngineKey:
    model_name: Any
    world_size: Any
    worker_id: Any
    chunk_hash: Any
    chunk_hash_hex: Any
    dtype: Any
    tags: Any
    def split_layers(self, num_layers): ...

class LayerCacheEngineKey(CacheEngineKey):
    layer_id: Any
