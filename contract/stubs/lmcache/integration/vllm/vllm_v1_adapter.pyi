from typing import Any

class LMCacheConnectorMetadata:
    requests: Any
    def add_request(self, req_meta): ...

class LMCacheConnectorV1Impl:
    _role: Any
    _vllm_config: Any
    device: Any
    kv_role: Any
    _manager: Any
    _layerwise_save_storers: Any
    layerwise_retrievers: Any
    lmcache_engine: Any
    lookup_client: Any
    load_specs: Any
    config: Any
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    def update_state_after_alloc(self, request, num_external_tokens): ...
    def request_finished(self, request, block_ids): ...
    def build_connector_meta(self, scheduler_output): ...
    def register_kv_caches(self, kv_caches): ...
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def get_block_ids_with_load_errors(self): ...
    def __init__(self, vllm_config, role, parent): ...

class ReqMeta:
    def __init__(self, req_id, token_ids, slot_mapping, load_spec=..., request_configs=...): ...
    req_id: Any
    token_ids: Any
    slot_mapping: Any
    load_spec: Any
    save_spec: Any
    request_configs: Any

class LoadSpec:
    def __init__(self, vllm_cached_tokens, lmcache_cached_tokens, can_load): ...
    vllm_cached_tokens: Any
    lmcache_cached_tokens: Any
    can_load: Any

class SaveSpec:
    can_save: Any
