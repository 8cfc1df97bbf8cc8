from typing import Any

class Scheduler:
    def _handle_invalid_blocks(self, invalid_block_ids, num_scheduled_tokens): ...
    def _preempt_request(self, request, timestamp, drop_stale_output=...): ...
    running: Any
    connector: Any
    recompute_kv_load_failures: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    prev_step_scheduled_req_ids: Any
    requests: Any
    skipped_waiting: Any
    kv_holding_waiting: Any
    failed_recving_kv_req_ids: Any
    block_size: Any
    max_num_scheduled_tokens: Any
    max_model_len: Any
