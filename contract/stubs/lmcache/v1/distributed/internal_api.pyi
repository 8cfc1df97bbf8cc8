from typing import Any

class L1MemoryDesc:
    size: Any

class L2AdapterListener:
    def on_l2_keys_stored(self, keys, sizes): ...

class L2StoreResult:
    def __new__(cls, success, bytes_transferred): ...
