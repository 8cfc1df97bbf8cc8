from typing import Any

from vllm.config import VllmConfig

class MultiprocExecutor:
    vllm_config: VllmConfig
    def collective_rpc(
        self, method: Any, *, args: Any, non_block: Any, unique_reply_rank: Any
    ) -> Any: ...
