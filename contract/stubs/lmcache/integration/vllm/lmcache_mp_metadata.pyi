from enum import Enum
from typing import Any

class LMCacheMPRequestState(Enum):
    PREFETCHING: Any

class LMCacheMPRequestTracker:
    cache_salt: Any
    max_offload_tokens: Any
    state: Any

class LMCacheMPRequestMetadata:
    direction: Any
    op: Any

class LMCacheMPConnectorMetadata:
    requests: Any
    def __init__(self): ...
