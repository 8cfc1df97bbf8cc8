from enum import Enum
from typing import Any

class LMCacheMPRequestState(Enum):
    PREFETCHING: Any
    WAITING_FOR_LOAD: Any

class LMCacheMPRequestTracker:
    cache_salt: Any
    max_offload_tokens: Any
    allocated_block_ids: Any
    num_lmcache_hit_tokens: Any
    state: Any

class LMCacheMPRequestMetadata:
    direction: Any
    request_id: Any
    cache_salt: Any
    request_configs: Any
    op: Any
    @staticmethod
    def GetRetrieveMetadata(  # noqa: N802 (LMCache's name)
        tracker: LMCacheMPRequestTracker,
        lmcache_tokens_per_chunk: int,
        group_tokens_per_block: list[int],
    ) -> LMCacheMPRequestMetadata | None: ...

class LMCacheMPConnectorMetadata:
    requests: Any
    def __init__(self): ...
