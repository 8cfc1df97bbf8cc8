from typing import Any

class LMCacheEngineConfig:
    chunk_size: Any
    save_unfull_chunk: Any
    enable_kv_events: Any
    extra_config: Any
    pre_caching_hash_algorithm: Any
    from_defaults: Any
    max_local_cpu_size: Any
    storage_plugins: Any
    use_layerwise: Any
    cache_policy: Any
    get_extra_config_value: Any
    pin_timeout_sec: Any
