from typing import Any

class GPUModelRunner:
    kv_caches: Any
