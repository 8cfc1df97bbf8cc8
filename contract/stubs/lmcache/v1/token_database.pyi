from typing import Any

class ChunkedTokenDatabase:
    chunk_size: Any
    config: Any
    def __init__(self, config=..., metadata=...): ...
