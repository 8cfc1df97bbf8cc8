"""What vLLM's worker tells no connector, and ours must know: a step begins, the weights change.

A step that fails on one of several ranks ends that rank's process, see `failures`.

The worker gets a class of its own, made of `WorkerHooks` and the class that it had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_transfer

from lmcache_xpu.kv_connector.failures import ending_rank_on_failure

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

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

    parallel_config: Any  # vLLM's

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Compute a step. Our connector hears of it first, and when it is enqueued."""
        group = _group()
        begin, end = (getattr(group, name, None) for name in ("begin_step", "end_enqueueing"))
        with ending_rank_on_failure(self.parallel_config.world_size):
            try:
                if begin is not None and scheduler_output.kv_connector_metadata is not None:
                    begin(scheduler_output.kv_connector_metadata)
                return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            finally:
                if end is not None:
                    end()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample what a step computed."""
        with ending_rank_on_failure(self.parallel_config.world_size):
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]


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
        for connector in _connectors(_group()):
            if hasattr(connector, "change_weights"):
                connector.change_weights()
        return method(worker, *args, **kwargs)

    return change


def _group() -> Any:
    """Return vLLM's connector of this worker; None before it is made."""
    return kv_transfer.get_kv_transfer_group() if kv_transfer.has_kv_transfer_group() else None


def _connectors(group: Any) -> Iterator[Any]:
    """Yield a connector, and those that it holds as vLLM's MultiConnector does."""
    yield group
    yield from getattr(group, "_connectors", ())
