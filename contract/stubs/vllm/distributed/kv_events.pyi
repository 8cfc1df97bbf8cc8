from typing import Any

class BlockStored(KVCacheEvent):
    def __init__(
        self,
        block_hashes,
        parent_block_hash,
        token_ids,
        block_size,
        lora_id,
        medium,
        lora_name,
        extra_keys=...,
        group_idx=...,
        kv_cache_spec_kind=...,
        locality=...,
        ownership=...,
    ): ...
    block_hashes: Any
    token_ids: Any
    extra_keys: Any

class BlockRemoved(KVCacheEvent):
    def __init__(self, block_hashes, medium, group_idx=..., locality=..., ownership=...): ...

class KVCacheEvent: ...

MEDIUM_CPU: Any
