"""The loads that a worker's step needs, and what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache_xpu.metrics import loaded

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

    from lmcache_xpu.cache_engine.factory import Adapter
    from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
    from lmcache_xpu.gpu_connector.in_flight import InFlight
    from lmcache_xpu.kv_connector.rank_group import RankGroup

__all__ = ["StepLoads"]


class StepLoads:
    """Begun by the worker's half of the connector or by vLLM, on the engine's thread.

    Args:
        adapter: LMCache's connector, which has been told of the step.
        unfilled: the record of failed loads.
        ranks: that share out the heads; None where this one has all.

    Attributes:
        count: number of requests that have something to load in this step.
        begun: whether these loads have begun.
    """

    def __init__(self, adapter: Adapter, unfilled: UnfilledBlocks, ranks: RankGroup | None) -> None:
        self.count = 0
        self.begun = False
        self._adapter = adapter
        self._unfilled = unfilled
        self._ranks = ranks
        self._described = False  # the step has some, on all ranks
        self._early: set[str] = set()  # requests whose loads began before their step

    def load_early(self) -> None:
        """Load what LMCache's connector has been told of a request of the next step."""
        self.load(1)
        self._early.update(request.req_id for request in self._adapter.step.requests)

    def describe(self) -> None:
        """Count the loads of a step that have not begun; all ranks are told of the same."""
        loads = [
            request
            for request in self._adapter.step.requests
            if request.load_spec is not None and request.load_spec.can_load
        ]
        for request in loads:
            if request.req_id in self._early:
                request.load_spec = None
        self.count = sum(request.load_spec is not None for request in loads)
        self.begun, self._described = False, bool(loads)
        self._early.clear()

    def refuse(self) -> None:
        """Load nothing in this step; the blocks were reported."""
        self.count = 0

    def begin(self) -> None:
        """Load while vLLM prepares the step."""
        self.begun = True
        self.load(self.count)

    def load(self, requests: int) -> None:
        """Load what LMCache's connector has been told of, of so many requests."""
        loaded("step", requests)
        self._adapter.start_load_kv(SimpleNamespace(attn_metadata={}))

    def begin_prepared(self, context: ForwardContext, arguments: dict[str, Any]) -> None:
        """Load when vLLM says so, if that has not begun.

        vLLM's newer model runner loads before it enters a forward context where the step is one
        graph (up to 0.26), or always (since). LMCache skips the load if the context has no
        attention metadata, though the scheduler counts its tokens as computed: the step would
        compute from whatever the blocks hold. It looks at nothing else of them.

        Args:
            context: of the step, or an empty one.
            arguments: what vLLM passes beside it.
        """
        if self.begun:
            return
        attention = context.attn_metadata
        loaded("step", self.count)
        if attention is None and self.count:
            context.attn_metadata = arguments.get("attn_metadata", {})
        try:
            self._adapter.start_load_kv(context, **arguments)
        finally:
            context.attn_metadata = attention

    def end(self, in_flight: InFlight | None) -> None:
        """End this step's loads, and record what did not arrive. May be called again."""
        self._adapter.end_loads()
        if in_flight is not None:
            self._unfilled.add_missed(in_flight.end_step())
        engine: Any = self._adapter.lmcache_engine
        while slots := engine.gpu_connector.failed_slots:  # the thread that fetches may add more
            self._unfilled.add_slots(slots.pop())
        self._unfilled.add(self._adapter.get_block_ids_with_load_errors())
        self._unfilled.settle()

    def share_failures(self) -> None:
        """Count a load that failed on one rank on all; ranks wait for each other in such steps."""
        if self._ranks is not None and self._described:
            self._unfilled.share(self._ranks.union)
