from typing import Any

class ForwardContext:
    attn_metadata: Any
    cudagraph_runtime_mode: Any
