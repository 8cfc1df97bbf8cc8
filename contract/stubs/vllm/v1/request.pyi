from enum import IntEnum
from typing import Any

from vllm.lora.request import LoRARequest

class RequestStatus(IntEnum):
    PREEMPTED: Any
    WAITING_FOR_REMOTE_KVS: Any

class Request:
    kv_transfer_params: Any
    num_prompt_tokens: Any
    prompt_token_ids: Any
    status: Any
    request_id: Any
    cache_salt: Any
    lora_request: LoRARequest | None
    prompt_embeds: Any
    mm_features: Any
    all_token_ids: Any
    block_hashes: Any
    num_tokens: Any
    num_computed_tokens: Any
    sampling_params: Any
    skip_reading_prefix_cache: Any
    num_in_flight_tokens: Any
    num_output_placeholders: Any
    async_tokens_to_discard: Any
    shared_prefix_boundary: Any
    num_preemptions: Any
