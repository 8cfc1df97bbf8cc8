"""Calls of an engine's scheduler to its ranks, where these are processes of their own.

vLLM's executor brings them to all ranks, in their order with its steps. It is given to no
connector, so each of its calls shows it to us, see `patches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from lmcache_xpu.kv_connector.failures import ending_rank_on_failure

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from lmcache_xpu.kv_connector.step_metadata import StepMetadata

__all__ = ["RankCalls", "remembering_executor"]

_executors: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by the engine's ID


def remembering_executor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the replacement of `MultiprocExecutor.collective_rpc`, which notes whose it is."""

    @functools.wraps(original)
    def collective_rpc(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if (transfer := executor.vllm_config.kv_transfer_config) is not None:
            _executors[transfer.engine_id] = executor
        return original(executor, *args, **kwargs)

    return collective_rpc


class RankCalls:
    """Begins loads in all ranks of an engine.

    Args:
        executor: vLLM's, of the engine.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    @classmethod
    def of(cls, config: VllmConfig) -> RankCalls | None:
        """Return the calls of an engine with several ranks; None if vLLM has no such executor.

        Nor where the layers are shared out: there every request waits for its load.

        Args:
            config: of the engine.
        """
        if config.parallel_config.pipeline_parallel_size > 1:
            return None
        executor = _executors.get(config.kv_transfer_config.engine_id)
        return None if executor is None else cls(executor)

    def begin_load(self, metadata: StepMetadata) -> None:
        """Let each rank begin a load of the next step; see `WorkerSide.begin_load`.

        Does not wait for them. vLLM takes the answer of the first rank with that of the step.
        """
        self._executor.collective_rpc(
            _begin_load, args=(metadata,), non_block=True, unique_reply_rank=0
        )


def _begin_load(worker: Any, metadata: StepMetadata) -> None:
    """Begin a load in the rank of this process."""
    from vllm.distributed import kv_transfer

    begin = getattr(kv_transfer.get_kv_transfer_group(), "begin_load", None)
    if begin is not None:  # a MultiConnector leaves it to the step
        with ending_rank_on_failure(worker.parallel_config.world_size):
            begin(metadata)
