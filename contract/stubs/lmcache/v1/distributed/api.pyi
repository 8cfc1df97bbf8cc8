from enum import Enum
from typing import Any

class EncodedObjectKey:
    def __init__(
        self, chunk_hash_hex, model_name, kv_rank, object_group_id=..., cache_salt=...
    ): ...
    def to_object_key(self): ...

class AttnWindowDesc:
    def __init__(self, num_chunks_in_sw, world_size=...): ...

class MemoryLayoutDesc:
    shapes: Any
    dtypes: Any
    def __init__(self, shapes, dtypes): ...

class MemoryResidency(Enum):
    LOCAL: Any
    REMOTE: Any

class MemorySegment(Enum):
    STORAGE: Any

class MemoryTags:
    def __init__(self, segment, residency): ...

class GroupedObjectKeys:
    keys: Any
    object_group_id: Any
    def __init__(self, keys, object_group_id, layout_desc, sliding_window_size=...): ...

class PrefetchTaskSpec:
    def __init__(self, key_groups, *, allowed_l2_memory_tags=...): ...

class ObjectKey:
    chunk_hash: Any
    model_name: Any
    object_group_id: Any
    def __init__(self, chunk_hash, model_name, kv_rank, object_group_id=..., cache_salt=...): ...
    def to_encoded_object_key(self): ...
