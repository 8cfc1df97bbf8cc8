from typing import Any

class LoadStoreOp:
    block_ids: Any
    token_ids: Any
    token_bytes: Any
    start: Any
    end: Any
    skip_first_n_tokens: Any

class HeartbeatThread:
    stop_requested: Any
    _health_event: Any
    def __init__(self, req_client, health_event, interval, instance_id=...): ...
    def register_recover_callback(self, callback): ...
    def start(self): ...
    def _execute(self): ...

class LMCacheMPSchedulerAdapter:
    lmcache_tokens_per_chunk: Any
    req_clients: Any
    model_name: Any
    world_size: Any
    is_healthy: Any
    _health_events: Any
    _heartbeat_interval: Any
    _heartbeat_lock: Any
    _heartbeats: Any
    _mq_timeout: Any
    def __init__(
        self,
        server_urls,
        context,
        model_name,
        vllm_block_size,
        parallel_strategy,
        *,
        extra_config=...,
    ): ...
    def check_lookup_result(self, request_id): ...
    def cleanup_lookup_result(self, request_id): ...
    def shutdown(self): ...
    def _ensure_heartbeat_started(self): ...
    def _mark_lookup_timed_out(self, url): ...
    def _recover_server_chunk_size(self, server_url, req_client): ...

class LMCacheMPWorkerAdapter:
    instance_id: Any
    req_client: Any
    kv_caches: Any
    transfer_ctx: Any
    model_name: Any
    world_size: Any
    parallel_strategy: Any
    lmcache_tokens_per_chunk: Any
    blocks_in_chunk: Any
    _health_event: Any
    _heartbeat: Any
    _heartbeat_interval: Any
    _heartbeat_lock: Any
    _mq_timeout: Any
    error_block_ids: Any
    retrieve_futures: Any
    is_healthy: Any
    def __init__(
        self,
        server_url,
        context,
        model_name,
        vllm_block_size,
        parallel_strategy,
        *,
        extra_config=...,
        enable_kv_events=...,
    ): ...
    def register_kv_caches(self, kv_caches, engine_group_infos=..., layout_hints=...): ...
    def shutdown(self): ...
    def _create_key(
        self, token_ids, start, end, *, request_id, cache_salt=..., request_configs=...
    ): ...
    def _ensure_heartbeat_started(self): ...
    def _block_ids_per_group(self, op): ...
    def _reregister_kv_caches_callback(self): ...
    def get_failed_request_ids(self): ...
    def _send_register_kv_caches_request(self, kv_caches): ...
