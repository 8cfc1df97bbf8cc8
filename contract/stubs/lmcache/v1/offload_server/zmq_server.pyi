from typing import Any

class ZMQOffloadServer:
    running: Any
    thread: Any
    socket: Any
    ctx: Any
    lmcache_engine: Any
    def __init__(self, lmcache_engine, tp_rank): ...
    def close(self): ...
    def offload(self, hashes, slot_mapping, offsets): ...
