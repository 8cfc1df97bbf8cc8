from typing import Any

class AttentionSpec(KVCacheSpec):
    num_heads: Any
    num_kv_heads: Any
    head_size: Any
    dtype: Any
    block_size: Any
    state_content_size_bytes: Any
    real_page_size_bytes: Any

class FullAttentionSpec(AttentionSpec):
    sliding_window: Any
    attention_chunk_size: Any

class MLAAttentionSpec(FullAttentionSpec): ...

class SlidingWindowSpec(AttentionSpec):
    sliding_window: Any

class SlidingWindowMLASpec: ...
class ChunkedLocalAttentionSpec: ...
class MambaSpec: ...

class KVCacheConfig:
    kv_cache_groups: list[KVCacheGroupSpec]
    needs_kv_cache_zeroing: Any
    num_blocks: Any

class KVCacheGroupSpec:
    kv_cache_spec: Any
    layer_names: Any
    enable_kv_transfer: Any

class KVCacheSpec:
    block_size: Any
    tokens_per_state: Any

class UniformTypeKVCacheSpecs:
    kv_cache_specs: Any

def get_kv_cache_spec_kind(kv_cache_spec): ...
