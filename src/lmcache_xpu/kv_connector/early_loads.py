"""Loads that begin while vLLM still schedules the other requests of a step.

vLLM decides on a whole step before its worker hears of it. For four prompts of 17,000 tokens that
took 17 milliseconds, in which the link was idle. So a request's load begins as soon as it has its
blocks, where scheduler and worker share a process (one device). The step then finds it begun, see
`StepLoads`. What is left out here, or can't begin yet, begins with the step.

This is the scheduler's half. vLLM runs no step between its decision and the step that it is for,
and takes back nothing that it decided (`Scheduler.schedule`: only requests that ran before are
preempted, and none is admitted in such a step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_xpu.kv_connector.step_metadata import StepMetadata
from lmcache_xpu.transfer.slots import slots_of
from lmcache_xpu.versions.lmcache import ReqMeta, extract_request_configs

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lmcache_xpu.kv_connector.worker import WorkerSide

__all__ = ["EarlyLoads"]


class _Prefix(Sequence[int]):
    """The first tokens of a request, of which `[:n]` gives the first n, without a copy.

    LMCache counts tokens and cuts them, and looks at none of chunks whose keys it has from their
    look-up. Three copies of 60,000 numbers took milliseconds.
    """

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self._tokens = tokens
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self._tokens[range(self._count)[index]]
        start, stop, step = index.indices(self._count)
        if index.start is None and step == 1:
            return _Prefix(self._tokens, stop)
        return self._tokens[start:stop:step]


class EarlyLoads:
    """Begins the loads of one scheduler's connector.

    Args:
        adapter: LMCache's connector.
        block_size: tokens of a block.
        worker: finds the worker's half; None if it is in another process.
        named: gives the tokens by which LMCache names a request's chunks; see `cache_salt`.
    """

    def __init__(
        self,
        adapter: Any,
        block_size: int,
        worker: Callable[[], WorkerSide | None],
        named: Callable[[str, Sequence[int]], Sequence[int]],
    ) -> None:
        self._adapter = adapter
        self._block_size = block_size
        self._worker = worker
        self._named = named

    def begin(self, request: Request, blocks: Sequence[int]) -> None:
        """A request has its blocks: load what LMCache has promised for it.

        Args:
            request: that will be in the next step.
            blocks: all of its blocks.
        """
        spec = self._adapter.load_specs.get(request.request_id)
        if spec is None or not spec.can_load:
            return
        # Of images and embeddings LMCache makes names of its own, later.
        named_later = request.mm_features or request.prompt_embeds is not None
        if named_later or (worker := self._worker()) is None:
            return
        loaded, kept = spec.lmcache_cached_tokens, spec.vllm_cached_tokens // self._block_size
        slots = slots_of(blocks, self._block_size)
        # LMCache loads what its own look-up found of these, and counts all of them.
        tokens = _Prefix(request.all_token_ids, min(len(slots), len(request.all_token_ids)))
        load = ReqMeta(
            request.request_id,
            token_ids=self._named(request.request_id, tokens),
            slot_mapping=slots[: len(tokens)],
            load_spec=spec,
            request_configs=extract_request_configs(request.sampling_params),
        )
        worker.begin_load(
            StepMetadata(
                [load], new_blocks=frozenset(blocks[kept:]), tokens=request.num_tokens - loaded
            )
        )
