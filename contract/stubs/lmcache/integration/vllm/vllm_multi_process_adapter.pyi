from typing import Any

class LoadStoreOp:
    block_ids: Any
    token_ids: Any
    token_bytes: Any
    start: Any
    end: Any
    skip_first_n_tokens: Any

class LMCacheMPSchedulerAdapter:
    lmcache_tokens_per_chunk: Any
    def cleanup_lookup_result(self, request_id): ...

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
    _mq_timeout: Any
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
    def _send_register_kv_caches_request(self, kv_caches): ...
