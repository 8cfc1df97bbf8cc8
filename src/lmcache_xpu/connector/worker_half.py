"""The worker's half of the connector: its transfers, step by step.

A step is `begin_ahead` by a scheduler in this process, `begin_step`, `load`, `in_steps` for each
layer, and `store` and `take_unfilled` in either order.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.utils import calculate_draft_layers
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from lmcache_xpu.cache.protocol import Cache
from lmcache_xpu.connector.request_guard import Unserved
from lmcache_xpu.connector.step import Step, WorkerReport, awaiting_layers, may_run_as_one_graph
from lmcache_xpu.copies.group_copies import GroupCopies, block_ids
from lmcache_xpu.copies.step_loads import StepLoads
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.metrics import loaded

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_xpu.model.kv_cache_groups import CacheGroup

TIMEOUT, STAGING_MIB = "xpu.server_timeout_s", "xpu.staging_mib"
DRAIN_S = 10.0
# That a worker waits in a step without tokens; as vLLM's own loop, where the engine has a process.
IDLE_S = 0.001


class WorkerHalf:
    """Called with steps and layers by vLLM's model runner, on the engine's thread."""

    transfers: Transfers  # once the KV cache is registered
    in_steps: StepLoads

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: Mapping[str, Any],
        client: Cache,
        groups: Sequence[CacheGroup],
        beat_s: float,
    ) -> None:
        self._config = config
        self._options = options
        self._client = client
        self._groups = groups
        self._beat_s = beat_s
        self._blocks = kv_cache_config.num_blocks
        # Where vLLM zeroes new blocks, its newer runner does so before we hear of the step.
        self._zeroed = bool(kv_cache_config.needs_kv_cache_zeroing)
        # Newer vLLM asks for requests whose loads failed, older for their blocks.
        self._reports_requests = hasattr(KVConnectorBase_V1, "get_transfer_results")
        self._step: Step | None = None
        self._ahead: Step | None = None  # a scheduler in this process has begun it
        self._failed: set[str] = set()
        self._epoch = 0  # number of the last that a step was of
        self._outdated = -1  # number of the epoch in which the weights changed

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache, and register it with the server.

        Raises LayoutError for a KV cache that can't be read, and SettingsError if the server lends
        no memory, or answers no look-up.
        """
        staging = self._options.get(STAGING_MIB)
        staging_bytes = None if staging is None else int(staging) * 2**20
        chunk_tokens = self._client.chunk_tokens
        copies = [
            GroupCopies(group, kv_caches, self._blocks, chunk_tokens, staging_bytes)
            for group in self._groups
        ]
        timeout_s = float(self._options.get(TIMEOUT, 1.0))
        draft_layers = calculate_draft_layers(self._config)
        layers = awaiting_layers(self._config)
        self.transfers = Transfers(self._client, copies, timeout_s, layers, draft_layers)
        self.in_steps = self.transfers.in_steps
        self.transfers.register()
        self._client.start_heartbeat(
            self._beat_s, self.transfers.register_again, self.transfers.give_back_gone
        )

    def change_weights(self) -> None:
        """The weights are about to change: nothing is loaded or stored until another epoch."""
        self._outdated = self._epoch

    def drain(self) -> bool:
        """Wait for the transfers on their way; whether they have ended in `DRAIN_S`."""
        deadline = time.monotonic() + DRAIN_S
        while self.transfers.busy:
            if time.monotonic() > deadline:
                return False
            time.sleep(IDLE_S)
        return True

    # A step

    def begin_ahead(self, step: Step) -> None:
        """Begin a step that vLLM has just decided on, by a scheduler in this process."""
        self._ask_for(step)
        self.in_steps.begin_answered(step.tokens, scheduling=True)
        self._ahead = step

    def begin_step(self, step: Step) -> None:
        """Begin a step, before vLLM may write new blocks; loads begin that the server answered."""
        loaded("computed", step.computed_hits)
        is_asked_for, self._ahead = self._ahead is step, None
        self._epoch = max(self._epoch, step.epoch)
        if self._outdated >= self._epoch:
            step, is_asked_for = self._refused(step), False
        self._step = step
        if not is_asked_for:
            self._ask_for(step)
        self.in_steps.begin_answered(step.tokens)

    def load(self, context: ForwardContext, arguments: dict[str, Any]) -> None:
        """Begin this step's loads, those inside it first; arguments as `may_run_as_one_graph`."""
        if (step := self._step) is None:
            return
        if step.loads:
            self.in_steps.begin(whole=may_run_as_one_graph(self._config, context, arguments))
        if step.waiting:
            event = self.transfers.event()
            for load in step.waiting:
                self.transfers.load(load, event)

    def store(self) -> None:
        """Store what this step computed, beside the engine."""
        if (step := self._step) is None:
            return
        self.in_steps.end()
        if step.stores and self._client.scope.is_writer:
            event = self.transfers.event()
            for store in step.stores:
                self.transfers.store(store, event, step.sources.get(store.request_id, ()))
        if self._zeroed:
            self.transfers.let_write()

    def end_step(self) -> None:
        """Forget a step that is enqueued."""
        self._step = None

    def _ask_for(self, step: Step) -> None:
        self.transfers.let_write(step.written)
        self.transfers.fail(step.unserved.waiting)
        self.in_steps.begin_step(step.written)
        self.in_steps.fail(step.unserved.blocks)
        for load in step.loads:
            self.in_steps.ask(load)

    def _refused(self, step: Step) -> Step:
        """Return a step whose loads count as failed, and which stores nothing."""
        blocks = step.unserved.blocks.union(*(block_ids(load, self._groups) for load in step.loads))
        waiting = {load.request_id: block_ids(load, self._groups) for load in step.waiting}
        unserved = Unserved(blocks, {**step.unserved.waiting, **waiting})
        return replace(step, stores=(), loads=(), waiting=(), sources={}, unserved=unserved)

    # What vLLM and the scheduler's half ask for

    def take_unfilled(self) -> Collection[int]:
        """Return block IDs whose loads failed since the last call; see `pending_failures`.

        Where vLLM does not ask for failed requests, those of loads that they waited for as well.
        """
        unfilled = self.in_steps.take()
        if self._reports_requests:
            return unfilled
        waited = self.transfers.take_unfilled()
        return waited.union(unfilled) if waited else unfilled

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those that failed."""
        ended, failed = self.transfers.take_ended()
        self._failed |= failed
        if not ended and self._step is not None and not self._step.tokens:
            # Requests wait for an answer or a load, and vLLM asks again at once where its engine is
            # in the caller's process: the threads that take them would wait for each turn.
            time.sleep(IDLE_S)
        return ended, failed

    def report(self) -> WorkerReport | None:
        """Return what became of loads since the last call, and which step has ended."""
        failed, self._failed = self._failed, set()
        report = WorkerReport(
            failed,
            self.transfers.take_damaged(),
            self.transfers.moves.take_speed(),
            None if self._step is None else self._step.number,
            self._outdated if self._outdated >= self._epoch else -1,
        )
        return None if report == WorkerReport() else report

    def shutdown(self) -> None:
        """End the transfers, and tell the server; waits for copies under way."""
        self._client.stop_heartbeat()
        if hasattr(self, "transfers"):
            self.transfers.unregister()
            self.transfers.close()
        self._client.close()
