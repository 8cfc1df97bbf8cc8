from enum import Enum
from typing import Any

class MemoryFormat(Enum):
    KV_2LTD: Any
    KV_T2D: Any
    KV_MLA_FMT: Any

class MemoryObj:
    def ref_count_up(self): ...
    def ref_count_down(self): ...
    def pin(self): ...
    def unpin(self): ...
    is_pinned: Any
    def is_valid(self): ...
    def get_size(self): ...
    metadata: MemoryObjMetadata
    byte_array: Any
    raw_tensor: Any

class MemoryObjMetadata:
    def __init__(
        self,
        shape,
        dtype,
        address,
        phy_size,
        ref_count,
        *,
        fmt=...,
        shapes=...,
        dtypes=...,
    ): ...
    shape: Any
    dtype: Any
    fmt: Any
    shapes: Any
    dtypes: Any
    cached_positions: Any
