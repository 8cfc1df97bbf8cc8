"""What differs between the accepted versions of vLLM, each with its cause.

The rest of this package asks here and knows no version. vLLM is asked for what it has, not for its
number: a build between two releases has what it has.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

DIFFUSION_MODULE = "vllm.v1.core.sched.diffusion_scheduler"


def kv_heads(spec: AttentionSpec) -> int:
    """Return the KV heads of a layer; `num_heads` since 0.28, when MLA's specs got it too."""
    return int(spec.num_heads if hasattr(spec, "num_heads") else spec.num_kv_heads)


def content_bytes(spec: AttentionSpec) -> int:
    """Return the bytes of one head of one token, keys and values; a property since 0.28."""
    if hasattr(spec, "state_content_size_bytes"):
        return int(spec.state_content_size_bytes)
    return int(spec.real_page_size_bytes // (spec.block_size * kv_heads(spec)))


def tokens_per_state(spec: KVCacheSpec) -> Any:
    """Return the tokens that share a state; before 0.29 no spec has more than one."""
    return getattr(spec, "tokens_per_state", 1)


def is_transferred(group: KVCacheGroupSpec) -> bool:
    """Return whether a connector gets a group's blocks; before 0.29 it gets those of all."""
    return bool(getattr(group, "enable_kv_transfer", True))


def kv_cache_layout(config: VllmConfig) -> str:
    """Return the memory order of the KV cache, by vLLM's name for it.

    Since 0.29 the engine's configuration holds it. Before, a function tells it that asks for the
    current configuration, which is not set in a scheduler whose workers have their own processes.
    """
    if hasattr(config.cache_config, "get_resolved_kv_cache_layout"):
        return str(config.cache_config.get_resolved_kv_cache_layout().name)
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    with set_current_vllm_config(config):
        return str(get_kv_cache_layout())


def event_extra_keys(keys: Sequence[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None]:
    """Return what KV events say of blocks' extra keys.

    Since 0.31 the keys that blocks are hashed with have tags, which events leave out.
    """
    try:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys
    except ImportError:
        return list(keys)
    untagged: list[tuple[Any, ...] | None] | None = to_event_extra_keys(keys)
    return untagged or []


def event_fields(event: type, **values: Any) -> dict[str, Any]:
    """Return those of some values that a KV event has a field for: `ownership` came with 0.29."""
    names = getattr(event, "__struct_fields__", ())
    return {name: value for name, value in values.items() if name in names}


def preempt(scheduler: Any, request: Request, timestamp: float, in_this_step: int) -> None:
    """Preempt a running request, taken from the list of these, and drop its tokens under way.

    0.26 has no parameter that drops them. Its own reset of the prefix cache counts the outputs to
    be dropped, as here; but this step's is skipped already, so only that of a later one is counted.
    `in_this_step`: its tokens in the step whose output is read now.
    """
    if "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters:
        scheduler._preempt_request(request, timestamp, drop_stale_output=True)
        return
    is_on_its_way = request.num_in_flight_tokens > in_this_step
    answers = is_on_its_way and request.num_output_placeholders > 0
    scheduler._preempt_request(request, timestamp)
    request.async_tokens_to_discard = int(answers)
    request.num_output_placeholders = 0


def waiting_for_loads(scheduler: Any) -> Iterable[Request]:
    """Return requests among which are all that wait for loads; in a queue of theirs since 0.31."""
    if hasattr(scheduler, "kv_holding_waiting"):
        queue: Iterable[Request] = scheduler.kv_holding_waiting
    else:
        queue = scheduler.skipped_waiting
    return queue


def scheduler_class(config: VllmConfig) -> Any:
    """Return the scheduler's class that vLLM would choose, were there no other one named.

    Since 0.31 models of diffusion have one of their own, which vLLM names before it is asked.
    """
    scheduler = copy.copy(config.scheduler_config)
    scheduler.scheduler_cls = None
    if getattr(config, "diffusion_config", None) is not None:
        ahead = "Async" if scheduler.async_scheduling else ""
        scheduler.scheduler_cls = f"{DIFFUSION_MODULE}.Diffusion{ahead}Scheduler"
    return scheduler.get_scheduler_cls()
