"""What vLLM's worker tells no connector, and ours must know: the weights change.

The worker gets a class of its own, made of `WorkerHooks` and the class that it had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed import kv_transfer

__all__ = ["WEIGHT_CHANGES", "WorkerHooks", "hook_worker"]

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
    """Stands before the class of a worker; see `hook_worker`."""


def hook_worker(worker: Any) -> None:
    """Put `WorkerHooks` before the class of a worker, unless that was done.

    Methods that this version of vLLM lacks stay missing.
    """
    kind = type(worker)
    if not issubclass(kind, WorkerHooks):
        changes = {
            name: _changing(getattr(kind, name)) for name in WEIGHT_CHANGES if hasattr(kind, name)
        }
        worker.__class__ = type(kind.__name__, (WorkerHooks, kind), changes)


def _changing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method of a subclass that tells our connector before the weights change."""

    @functools.wraps(method)
    def change(worker: Any, *args: Any, **kwargs: Any) -> Any:
        for connector in _connectors():
            if hasattr(connector, "change_weights"):
                connector.change_weights()
        return method(worker, *args, **kwargs)

    return change


def _connectors() -> Iterator[Any]:
    """Yield vLLM's connector of this worker, and those that it holds as a MultiConnector does."""
    if kv_transfer.has_kv_transfer_group():
        yield (group := kv_transfer.get_kv_transfer_group())
        yield from getattr(group, "_connectors", ())
