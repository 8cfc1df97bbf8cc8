"""What vLLM offers no connector of its worker: changed weights, and the worker in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What a worker of vLLM 0.32 offers that leaves it with other weights, or may.
WEIGHT_CHANGES = (
    "load_model",
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "sleep",
    "wake_up",
    "discard",
)


class WorkerHooks:
    """Marks the class of a worker whose connector knows when its weights change."""


def hook_worker(worker: Any) -> None:
    """Give a worker a subclass of its class, with `WorkerHooks`, unless that was done.

    Methods that this version of vLLM lacks stay missing.
    """
    kind = type(worker)
    if not issubclass(kind, WorkerHooks):
        changes = {
            name: _changing(getattr(kind, name)) for name in WEIGHT_CHANGES if hasattr(kind, name)
        }
        worker.__class__ = type(kind.__name__, (WorkerHooks, kind), changes)


def _changing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method of a subclass that calls `change_weights` of our connectors first."""

    @functools.wraps(method)
    def change(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if kv_transfer.has_kv_transfer_group():
            group: Any = kv_transfer.get_kv_transfer_group()
            for connector in (group, *getattr(group, "_connectors", ())):  # a MultiConnector's
                if hasattr(connector, "change_weights"):
                    connector.change_weights()
        return method(worker, *args, **kwargs)

    return change


def worker_half(config: VllmConfig) -> Any:
    """Return the worker's half of an engine's connector, if that is in this process; else None."""
    if not kv_transfer.has_kv_transfer_group():
        return None
    group: Any = kv_transfer.get_kv_transfer_group()
    is_of_engine = getattr(group, "engine_id", None) == config.kv_transfer_config.engine_id
    return getattr(group, "worker_half", None) if is_of_engine else None
