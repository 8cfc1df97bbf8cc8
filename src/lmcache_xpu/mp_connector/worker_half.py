"""The worker's half of the connector to LMCache's server: its transfers, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.utils import calculate_draft_layers

from lmcache_xpu.kv_connector import stats
from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.step_metadata import IDLE_S, may_run_as_one_graph
from lmcache_xpu.metrics import loaded
from lmcache_xpu.mp_connector.adapters import SERVER_URLS, arguments_of
from lmcache_xpu.mp_connector.group_copies import GroupCopies
from lmcache_xpu.mp_connector.step import Step, WorkerReport
from lmcache_xpu.mp_connector.worker_adapter import WorkerAdapter
from lmcache_xpu.transfer.devices import register_host
from lmcache_xpu.versions.lmcache_server import LMCacheMPConnector

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_xpu.mp_connector.kv_cache_groups import CacheGroup

__all__ = ["WorkerHalf"]

TIMEOUT_S, STAGING_MIB = "xpu.server_timeout_s", "xpu.staging_mib"


class WorkerHalf(LMCacheMPConnector):  # type: ignore[misc]  # untyped base
    """What vLLM's workers call, and this package has otherwise than LMCache."""

    worker_adapter: WorkerAdapter

    def start_worker(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: Mapping[str, Any],
        groups: Sequence[CacheGroup],
    ) -> None:
        """Begin, once LMCache's own has begun.

        Args:
            config: of the engine.
            kv_cache_config: of its KV cache.
            options: of this connector, and LMCache's.
            groups: of the KV cache that are stored.
        """
        self.collection = GarbageCollection()
        self._config = config
        self._options = options
        self._groups = groups
        self._blocks = kv_cache_config.num_blocks
        # Where vLLM zeroes new blocks, its newer runner does so before it tells us of the step.
        self._zeroed = bool(kv_cache_config.needs_kv_cache_zeroing)
        self._failed: set[str] = set()
        self._is_idle = False  # nothing is computed in this step
        if not isinstance(self.worker_adapter, WorkerAdapter):
            self.worker_adapter = self._own_adapter(self.worker_adapter)

    def _own_adapter(self, stock: Any) -> WorkerAdapter:
        """Make our adapter in place of LMCache's, which older LMCache makes without asking us."""
        return self.create_lmcache_mp_worker_adapter(
            server_url=self._options[SERVER_URLS],
            enable_kv_events=self._enable_kv_events,
            **arguments_of(stock, self._options),
        )

    def create_lmcache_mp_worker_adapter(self, **options: Any) -> WorkerAdapter:
        """Make the adapter of a worker; newer LMCache asks for it."""
        return WorkerAdapter(**options)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache."""
        staging = self._options.get(STAGING_MIB)
        copies = [
            GroupCopies(
                group,
                kv_caches,
                self._blocks,
                self.worker_adapter.lmcache_tokens_per_chunk,
                None if staging is None else int(staging) * 2**20,
                self._pin,
            )
            for group in self._groups
        ]
        timeout_s = float(self._options.get(TIMEOUT_S, 1.0))
        draft_layers = calculate_draft_layers(self._config)
        self.worker_adapter.register(kv_caches, copies, timeout_s, draft_layers)

    def _pin(self, address: int, size: int, device: torch.device) -> bool:
        """Pin memory of others than the server, whose memory was pinned when it was mapped."""
        transfers = self.worker_adapter.transfers
        lent = None if transfers is None else transfers.pinned(address)
        return register_host(address, size, device) if lent is None else lent

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: its loads begin, or are asked for, and what it writes is read by nobody."""
        assert isinstance(kv_connector_metadata, Step)
        self._is_idle = not kv_connector_metadata.tokens
        loaded("computed", kv_connector_metadata.computed_hits)
        self.worker_adapter.begin_step(kv_connector_metadata)

    # What a scheduler in this process calls before, see `near_loads`

    def name_early(self, request_id: str, describe: Callable[[], Any]) -> None:
        """Name a request's chunks while the server looks it up; see `WorkerAdapter.name_early`."""
        self.worker_adapter.name_early(request_id, describe)

    def ask_early(self, request_id: str, start: int, end: int) -> None:
        """Ask where chunks of a request are that was named, from one token to another."""
        self.worker_adapter.ask_early(request_id, start, end)

    def begin_early(self, step: Step) -> None:
        """Begin the loads of a step that vLLM has just decided on."""
        self.worker_adapter.begin_early(step)

    # What vLLM calls

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's loads, those inside it first."""
        step = self._get_connector_metadata()
        if step.loads and (in_steps := self.worker_adapter.in_steps) is not None:
            whole = may_run_as_one_graph(self._config, forward_context, kwargs)
            in_steps.begin(whole=whole)
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        if (in_steps := self.worker_adapter.in_steps) is not None:
            in_steps.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **_: Any
    ) -> None:
        """Enqueue more of what this step loads. Stores are behind the step."""
        if (in_steps := self.worker_adapter.in_steps) is not None:
            in_steps.after_layer(layer_name)

    def wait_for_save(self) -> None:
        """Store what this step computed, beside the engine."""
        transfers = self.worker_adapter.transfers
        if transfers is not None and transfers.in_steps is not None:
            transfers.in_steps.end()
            transfers.compute_from(self._get_connector_metadata().sources)
        super().wait_for_save()
        if self._zeroed:
            self.worker_adapter.leave()

    def get_block_ids_with_load_errors(self) -> Collection[int]:
        """Blocks that loads inside steps left unfilled since the last call; see `LateBlocks`.

        Where vLLM does not hear of failed requests, those of loads that they waited for as well.
        """
        unfilled = set() if (in_steps := self.worker_adapter.in_steps) is None else in_steps.take()
        if self._report_request_errors:
            return unfilled
        waited = set(self.worker_adapter.error_block_ids)
        self._failed = self.worker_adapter.get_failed_request_ids()
        return waited.union(unfilled) if waited else unfilled

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Loads that have ended; vLLM before 0.30 calls it, newer asks for transfer results."""
        _, ended = super().get_finished(set())
        if self._is_idle and not ended:
            # Requests wait for an answer or a load, and vLLM asks again at once where its engine is
            # in the caller's process: the threads that take them would wait for each turn.
            time.sleep(IDLE_S)
        return None, ended

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended since the last call, and which of them failed.

        Of stores vLLM hears nothing: it frees a request's blocks when it has ended.
        """
        results = super().get_transfer_results(set())
        self._failed = set(results.failed_recving)
        return results

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What became of loads since the last call, and which step has ended."""
        failed, self._failed = self._failed, set()
        step = self._get_connector_metadata().number
        if (transfers := self.worker_adapter.transfers) is None:
            return WorkerReport(failed, step=step) if failed or step else None
        damaged, speeds = transfers.take_damaged(), transfers.take_speeds()
        if not (failed or damaged or speeds.near or step):
            return None
        return WorkerReport(failed, damaged, speeds, step)

    def clear_connector_metadata(self) -> None:
        """Forget a step that is enqueued; the engine's thread waits for the device next."""
        super().clear_connector_metadata()
        self.collection.allow()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call."""
        return stats.take()
