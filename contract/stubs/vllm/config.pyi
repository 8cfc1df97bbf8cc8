from enum import Enum
from typing import Any

class VllmConfig:
    model_config: ModelConfig
    speculative_config: SpeculativeConfig | None
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    kv_transfer_config: KVTransferConfig
    kv_events_config: KVEventsConfig | None
    compilation_config: CompilationConfig
    num_speculative_tokens: Any
    scheduler_config: SchedulerConfig

class SchedulerConfig:
    scheduler_cls: Any
    async_scheduling: Any
    def get_scheduler_cls(self): ...

class ParallelConfig:
    rank: Any
    data_parallel_index: Any
    data_parallel_size: Any
    world_size: Any
    tensor_parallel_size: Any
    pipeline_parallel_size: Any
    decode_context_parallel_size: Any

def set_current_vllm_config(vllm_config): ...

class ModelConfig:
    seed: Any
    is_hybrid: Any
    hf_text_config: Any
    hf_config: Any
    model: Any
    dtype: Any
    use_mla: Any
    max_model_len: Any

class CacheConfig:
    enable_prefix_caching: Any
    cache_dtype: Any
    def get_resolved_kv_cache_layout(self): ...

class KVTransferConfig:
    is_kv_producer: Any
    kv_connector_extra_config: Any
    kv_role: Any
    engine_id: Any

class KVEventsConfig:
    enable_kv_cache_events: Any

class SpeculativeConfig:
    method: Any

class CompilationConfig:
    cudagraph_mode: CUDAGraphMode | None
    static_forward_context: Any

class CUDAGraphMode(Enum):
    def has_full_cudagraphs(self): ...
    def mixed_mode(self): ...
    FULL: Any
