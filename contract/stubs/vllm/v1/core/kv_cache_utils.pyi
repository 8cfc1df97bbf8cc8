from typing import Any

class KVCacheBlock:
    block_hash: Any

def to_event_extra_keys(extra_keys): ...
