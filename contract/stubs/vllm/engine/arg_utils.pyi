from typing import Any

class EngineArgs:
    # `vllm serve` has an option for each.
    block_size: Any
    data_parallel_size: Any
    distributed_executor_backend: Any
    dtype: Any
    enable_prefix_caching: Any
    enforce_eager: Any
    gpu_memory_utilization: Any
    kv_cache_memory_bytes: Any
    kv_events_config: Any
    kv_transfer_config: Any
    max_model_len: Any
    max_num_batched_tokens: Any
    max_num_seqs: Any
    pipeline_parallel_size: Any
    scheduler_cls: Any
    served_model_name: Any
    shutdown_timeout: Any
    tensor_parallel_size: Any

    @staticmethod
    def add_cli_args(parser): ...
    @classmethod
    def from_cli_args(cls, args): ...
