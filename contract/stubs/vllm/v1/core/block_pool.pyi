from typing import Any

class BlockPool:
    num_gpu_blocks: Any
    cached_block_hash_to_block: Any
    def get_num_free_blocks(self): ...
    blocks: Any
