from typing import Any

class LMCacheMetadata:
    kv_shape: Any
    model_name: Any
    role: Any
    kv_dtype: Any
    use_mla: Any
    worker_id: Any
    world_size: Any
    engine_id: Any
