"""Where scheduler and worker of an engine share a process: with one device, as vLLM starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["near_connector"]


def near_connector(config: VllmConfig) -> Any:
    """Return the connector of an engine's worker, if that is in this process; else None.

    It may be another one than the scheduler's, which holds that among others.
    """
    if not kv_transfer.has_kv_transfer_group():
        return None
    group: Any = kv_transfer.get_kv_transfer_group()
    engines = [of.kv_transfer_config.engine_id for of in (config, group._vllm_config)]
    return group if engines[0] == engines[1] else None
