from typing import Any

class IPCCacheServerKey:
    model_name: Any
    world_size: Any
    worker_id: Any
    cache_salt: Any
    start: Any
    end: Any
    token_ids: Any
    token_bytes: Any
    request_id: Any
    def __init__(
        self,
        *,
        model_name,
        world_size,
        worker_id,
        token_ids,
        start,
        end,
        request_id,
        cache_salt=...,
        request_configs=...,
        num_kv_readers=...,
    ): ...

class RegisterEngineDrivenContextPayload:
    def __init__(
        self,
        instance_id,
        model_name,
        world_size,
        block_size,
        num_layers,
        hidden_dim_size,
        dtype_str,
        use_mla,
        num_physical_slots=...,
    ): ...

class RegisterEngineDrivenContextResponse:
    shm_name: Any
    pool_size: Any

class PrepareStoreResponse:
    context: Any

class PrepareRetrieveResponse:
    success: Any
    context: Any
