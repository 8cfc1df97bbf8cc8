from typing import Any

class OffloadKey(bytes): ...

class ReqContext:
    req_id: str

class RequestOffloadingContext: ...

class Medium:
    STORAGE: Medium

class Locality:
    LOCAL: Locality

class LookupResult:
    HIT: LookupResult
    MISS: LookupResult

class OffloadingSpec:
    config: Any
    blocks_per_chunk: Any
