from typing import Any

class NewRequestData:
    req_id: Any
    block_ids: Any
    num_computed_tokens: Any
    prompt_token_ids: Any
    prefill_token_ids: Any

class CachedRequestData:
    req_ids: Any
    new_block_ids: Any
    num_computed_tokens: Any
    resumed_req_ids: Any

class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    total_num_scheduled_tokens: Any
    num_scheduled_tokens: Any
    finished_req_ids: Any
    kv_connector_metadata: Any
    new_block_ids_to_zero: list[int] | None
