"""LMCache's connector to its server, with the parts of this package.

It is LMCache's own by subclass. Requests are looked up, kept and ended by LMCache's code. What is
different:

    transfers   this package's, in threads beside the engine (`transfer_context`)
    keys        name the weights, adapters, embeddings and epochs too (`keys`)
    failures    of a load: its request is computed, and stores nothing
    blocks      are freed when their request ends; a step that writes some waits for their stores
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError, VersionError
from lmcache_xpu.kv_connector import stats
from lmcache_xpu.kv_connector.orphans import end_with_parent
from lmcache_xpu.mp_connector.group_copies import GroupCopies
from lmcache_xpu.mp_connector.keys import Keys
from lmcache_xpu.mp_connector.kv_cache_groups import cache_groups
from lmcache_xpu.mp_connector.scheduler_adapter import SchedulerAdapter
from lmcache_xpu.mp_connector.step import FailedLoads, Step, written_blocks
from lmcache_xpu.mp_connector.worker_adapter import WorkerAdapter
from lmcache_xpu.transfer.devices import register_host
from lmcache_xpu.versions import lmcache_server
from lmcache_xpu.versions.lmcache_server import LMCacheMPConnector, LMCacheMPRequestState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["ServerConnector"]

PREFIX = "lmcache.mp."  # of LMCache's options in vLLM's extra configuration
TIMEOUT_S, STAGING_MIB = "xpu.server_timeout_s", "xpu.staging_mib"
CONNECT_S = 60.0  # that a server has to come up
REFUSED = ("lazy_offload", "eager_prefetch", "transfer_intermediate_tensors")


class ServerConnector(LMCacheMPConnector):  # type: ignore[misc]  # untyped base
    """LMCache's connector to its server, with this package's transfers and keys.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions, or can't serve this model.
        SettingsError: options of LMCache that this connector does not serve, or no server answers.
        LayoutError: a KV cache that can't be served.
    """

    scheduler_adapter: SchedulerAdapter  # of a scheduler
    worker_adapter: WorkerAdapter  # of a worker

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        end_with_parent()
        versions.check(versions.installed())
        self._options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._url = self._options.get(f"{PREFIX}server_urls")
        if not isinstance(self._url, str) or "," in self._url:
            raise SettingsError(f"{PREFIX}server_urls={self._url!r}", "one URL, tcp://HOST:PORT")
        for name in REFUSED:
            if self._options.get(PREFIX + name):
                raise SettingsError(f"{PREFIX}{name}", "it to be off", "Leave it unset.")
        self._groups = cache_groups(kv_cache_config)
        if len(self._groups) > 1 and not lmcache_server.keeps_groups():
            raise VersionError(
                f"a model with {len(self._groups)} KV cache groups, and LMCache "
                f"{versions.installed().lmcache}",
                f"LMCache {lmcache_server.GROUPS_SINCE} or newer, whose server keeps groups apart",
                f"Install it: pip install --no-deps lmcache=={lmcache_server.GROUPS_SINCE}",
            )
        if not hasattr(KVConnectorBase_V1, "get_transfer_results"):
            raise VersionError(
                f"vLLM {versions.installed().vllm}",
                "a vLLM that is told of failed loads request by request, which came with 0.30",
                "Install a newer one, or use cache=in-process.",
            )
        deadline = time.monotonic() + CONNECT_S
        while not hasattr(self, "_group_tokens_per_block"):  # LMCache's, once the server answers
            try:
                super().__init__(vllm_config, role, kv_cache_config)
            except ConnectionError as error:
                if time.monotonic() > deadline:
                    raise SettingsError(
                        f"no answer from an LMCache server at {self._url}",
                        f"one that answers within {CONNECT_S:.0f} s",
                        "Start it, or leave server_url unset and `lmcache-xpu serve` does.",
                    ) from error
        self._blocks = kv_cache_config.num_blocks
        # Where vLLM zeroes new blocks, its newer runner does so before it tells us of the step.
        self._zeroed = bool(kv_cache_config.needs_kv_cache_zeroing)
        # Requests are reported as a whole: of a part of them LMCache would count tokens twice.
        self._report_request_errors = True
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_adapter = self._own_scheduler_adapter(self.scheduler_adapter)
            chunk_tokens = self.scheduler_adapter.lmcache_tokens_per_chunk
            self._keys = Keys(vllm_config, kv_cache_config, chunk_tokens)
            self._computed = 0  # of the request that is looked up
        else:
            self._failed: set[str] = set()
            if not isinstance(self.worker_adapter, WorkerAdapter):
                self.worker_adapter = self._own_adapter(self.worker_adapter)

    def _own_adapter(self, stock: Any) -> WorkerAdapter:
        """Make our adapter in place of LMCache's, which older LMCache makes without asking us."""
        stock.shutdown()
        return self.create_lmcache_mp_worker_adapter(
            server_url=self._url,
            context=zmq.Context.instance(),
            model_name=stock.model_name,
            vllm_block_size=stock.lmcache_tokens_per_chunk // stock.blocks_in_chunk,
            parallel_strategy=stock.parallel_strategy,
            extra_config=self._options,
            enable_kv_events=self._enable_kv_events,
        )

    def _own_scheduler_adapter(self, stock: Any) -> SchedulerAdapter:
        """Make our adapter in place of LMCache's, which asks nobody."""
        stock.shutdown()
        newer = {}
        if hasattr(stock, "_required_chunk_alignment"):
            newer["required_chunk_alignment"] = stock._required_chunk_alignment
        return SchedulerAdapter(
            server_urls=[self._url],
            context=zmq.Context.instance(),
            model_name=stock.model_name,
            vllm_block_size=stock.lmcache_tokens_per_chunk // stock.blocks_in_chunk,
            parallel_strategy=stock.parallel_strategy,
            extra_config=self._options,
            **newer,
        )

    # The worker's half

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
        self.worker_adapter.register(kv_caches, copies, timeout_s)

    def _pin(self, address: int, size: int, device: torch.device) -> bool:
        """Pin memory of others than the server, whose memory was pinned when it was mapped."""
        transfers = self.worker_adapter.transfers
        lent = None if transfers is None else transfers.pinned(address)
        return register_host(address, size, device) if lent is None else lent

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Let the engine wait before it writes blocks that stores still read."""
        assert isinstance(kv_connector_metadata, Step)
        self.worker_adapter.leave(kv_connector_metadata.written)

    def wait_for_save(self) -> None:
        """Store what this step computed, beside the engine."""
        super().wait_for_save()
        if self._zeroed:
            self.worker_adapter.leave()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is computed when its load has arrived."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended since the last call, and which of them failed.

        Of stores vLLM hears nothing: it frees a request's blocks when it has ended.
        """
        results = super().get_transfer_results(set())
        self._failed = set(results.failed_recving)
        return results

    def build_connector_worker_meta(self) -> FailedLoads | None:
        """Whose loads failed."""
        failed, self._failed = self._failed, set()
        transfers = self.worker_adapter.transfers
        damaged = set() if transfers is None else transfers.take_damaged()
        return FailedLoads(failed, damaged) if failed or damaged else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call."""
        return stats.take()

    # The scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._keys.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has; always in background."""
        self._computed = num_computed_tokens
        if request.skip_reading_prefix_cache:  # it must compute its whole prompt
            self._get_or_create_request_tracker(request)
            return 0, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def _get_or_create_request_tracker(self, request: Request) -> Any:
        before = self.request_trackers.get(request.request_id)
        tracker = super()._get_or_create_request_tracker(request)
        if tracker is not before:
            tracker.cache_salt = self._keys.admit(request, self._computed)
            if not self._keys.may_store(request.request_id):
                tracker.max_offload_tokens = 0
        return tracker

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """What the workers must know of a step."""
        metadata = super().build_connector_meta(scheduler_output)
        loads = [request.op for request in metadata.requests if request.direction == "RETRIEVE"]
        return Step(metadata, written_blocks(scheduler_output, loads, self._group_tokens_per_block))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, FailedLoads):
            return
        for request_id in report.damaged:
            self._keys.damaged(request_id)
        for request_id in report.requests:
            if (tracker := self.request_trackers.get(request_id)) is not None:
                tracker.max_offload_tokens = 0  # LMCache counts what it loaded as computed

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once, see `handle_preemptions`."""
        self._keys.finished(request.request_id)
        _, answer = super().request_finished(request, block_ids)
        return False, answer

    def reset_cache(self) -> bool | None:
        """Let nothing be found any more that was stored before; see `keys`.

        Returns:
            False if the server did not give back the room of what was stored.
        """
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        self._keys.reset()
        for request_id, tracker in list(self.request_trackers.items()):
            tracker.max_offload_tokens = 0
            if tracker.state is LMCacheMPRequestState.PREFETCHING:  # it asks again
                self.scheduler_adapter.cleanup_lookup_result(request_id)
                del self.request_trackers[request_id]
        return bool(super().reset_cache())
