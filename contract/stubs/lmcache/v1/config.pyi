from typing import Any

class LMCacheEngineConfig:
    chunk_size: Any
    save_unfull_chunk: Any
    enable_kv_events: Any
    extra_config: Any
    pre_caching_hash_algorithm: Any
    lookup_server_worker_ids: Any
    from_defaults: Any
    max_local_cpu_size: Any
    remote_storage_plugins: Any
    remote_url: Any
    storage_plugins: Any
    local_disk: Any
    enable_p2p: Any
    use_layerwise: Any
    cache_policy: Any
    get_extra_config_value: Any
    pin_timeout_sec: Any
