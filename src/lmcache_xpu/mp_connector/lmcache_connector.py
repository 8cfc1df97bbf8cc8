"""LMCache's connector to its server, with the parts of this package.

It is LMCache's own by subclass. Requests are looked up, kept and ended by LMCache's code. What is
different:

    transfers   this package's, in threads beside the engine (`transfer_context`)
    keys        name the weights, adapters, embeddings and epochs too (`keys`)
    loads       inside the step of their request, where that pays and vLLM's scheduler is ours
    failures    of a load: its request is computed, and stores nothing that came of it
    blocks      are freed when their request ends; a step that writes some waits for their stores
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import zmq
from lmcache.integration.vllm.utils import calculate_draft_layers
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.platforms import current_platform

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError, VersionError
from lmcache_xpu.kv_connector import stats
from lmcache_xpu.kv_connector.load_policy import LoadPolicy
from lmcache_xpu.kv_connector.orphans import end_with_parent
from lmcache_xpu.kv_connector.step_metadata import may_run_as_one_graph
from lmcache_xpu.metrics import loaded
from lmcache_xpu.mp_connector.group_copies import GroupCopies
from lmcache_xpu.mp_connector.hit_ways import HitWays
from lmcache_xpu.mp_connector.keys import Keys
from lmcache_xpu.mp_connector.kv_cache_groups import cache_groups
from lmcache_xpu.mp_connector.step import Step, WorkerReport, written_blocks
from lmcache_xpu.mp_connector.step_loads import StepLoads
from lmcache_xpu.mp_connector.worker_adapter import WorkerAdapter
from lmcache_xpu.transfer.devices import register_host
from lmcache_xpu.transfer.tuning import tuning_of
from lmcache_xpu.versions import lmcache_server
from lmcache_xpu.versions.lmcache_server import LMCacheMPConnector, LMCacheMPRequestState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["ServerConnector"]

PREFIX = "lmcache.mp."  # of LMCache's options in vLLM's extra configuration
TIMEOUT_S, STAGING_MIB, LOADS = "xpu.server_timeout_s", "xpu.staging_mib", "xpu.loads"
CONNECT_S = 60.0  # that a server has to come up
REFUSED = ("lazy_offload", "eager_prefetch", "transfer_intermediate_tensors")


class ServerConnector(LMCacheMPConnector):  # type: ignore[misc]  # untyped base
    """LMCache's connector to its server, with this package's transfers and keys.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions, or can't serve this model.
        SettingsError: options of LMCache that this connector does not serve, or no server answers.
        LayoutError: a KV cache that can't be served.
    """

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
        self._config = vllm_config
        self._has_one_group = len(kv_cache_config.kv_cache_groups) == len(self._groups) == 1
        self._blocks = kv_cache_config.num_blocks
        # Where vLLM zeroes new blocks, its newer runner does so before it tells us of the step.
        self._zeroed = bool(kv_cache_config.needs_kv_cache_zeroing)
        # Requests are reported as a whole: of a part of them LMCache would count tokens twice.
        self._report_request_errors = True
        if role is KVConnectorRole.SCHEDULER:
            chunk_tokens = self.scheduler_adapter.lmcache_tokens_per_chunk
            self._keys = Keys(vllm_config, kv_cache_config, chunk_tokens)
            self._computed = 0  # of the request that is looked up
            self._ways = HitWays()
            self._given_up: set[str] = set()  # requests for which nothing is looked up
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
        draft_layers = calculate_draft_layers(self._config)
        self.worker_adapter.register(kv_caches, copies, timeout_s, draft_layers)

    def _pin(self, address: int, size: int, device: torch.device) -> bool:
        """Pin memory of others than the server, whose memory was pinned when it was mapped."""
        transfers = self.worker_adapter.transfers
        lent = None if transfers is None else transfers.pinned(address)
        return register_host(address, size, device) if lent is None else lent

    @property
    def _in_steps(self) -> StepLoads | None:
        """The loads of a worker that are inside steps."""
        transfers = self.worker_adapter.transfers
        return None if transfers is None else transfers.in_steps

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: what it loads is asked for, and what it writes is not read any more."""
        assert isinstance(kv_connector_metadata, Step)
        loaded("computed", kv_connector_metadata.computed_hits)
        self.worker_adapter.begin_step(kv_connector_metadata.written, kv_connector_metadata.loads)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's loads, those inside it first."""
        step = self._get_connector_metadata()
        if step.loads and (in_steps := self._in_steps) is not None:
            whole = may_run_as_one_graph(self._config, forward_context, kwargs)
            in_steps.begin(step.tokens, whole=whole)
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        if (in_steps := self._in_steps) is not None:
            in_steps.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **_: Any
    ) -> None:
        """Enqueue more of what this step loads. Stores are behind the step."""
        if (in_steps := self._in_steps) is not None:
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
        """Blocks that loads inside steps left unfilled since the last call; see `LateBlocks`."""
        return set() if (in_steps := self._in_steps) is None else in_steps.take()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended since the last call, and which of them failed.

        Of stores vLLM hears nothing: it frees a request's blocks when it has ended.
        """
        results = super().get_transfer_results(set())
        self._failed = set(results.failed_recving)
        return results

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What became of loads since the last call."""
        failed, self._failed = self._failed, set()
        if (transfers := self.worker_adapter.transfers) is None:
            return WorkerReport(failed) if failed else None
        damaged, speeds = transfers.take_damaged(), transfers.take_speeds()
        if not (failed or damaged or speeds.near):
            return None
        return WorkerReport(failed, damaged, speeds)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this process counted since the last call. The scheduler's half counts nothing."""
        return stats.take() if self.role is KVConnectorRole.WORKER else None

    # The scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._keys.bind(gpu_block_pool)

    def load_in_steps(self) -> None:
        """Let loads be inside steps: vLLM's scheduler begins requests anew whose load failed.

        Not with several ranks, of which the others would store what came of it; nor where vLLM
        zeroes the blocks after it has begun the loads, or has several KV cache groups, of which it
        is told no blocks.
        """
        alone = self._config.parallel_config.world_size == 1
        if alone and self._has_one_group and not self._zeroed:
            loads = self._options.get(LOADS, "auto")
            self._ways.allow_steps(LoadPolicy(loads, tuning_of(current_platform.device_type)))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether in background."""
        self._computed = num_computed_tokens
        # It must compute its whole prompt, or a load of it has failed.
        if request.skip_reading_prefix_cache or request.request_id in self._given_up:
            self._get_or_create_request_tracker(request)
            return 0, False
        matched: int | None
        matched, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not matched:
            return matched, matched is None
        way = self._ways.choose(request, num_computed_tokens, matched)
        return (0, False) if way == "computed" else (matched, way == "async")

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step, or waits for its load."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._ways.is_computed(request.request_id):
            # LMCache would count as computed what the server has and nobody loads.
            self.request_trackers[request.request_id].num_lmcache_hit_tokens = 0

    def give_up_hits(self, request_id: str) -> None:
        """A load inside a step failed: from now on its request is computed; see `scheduler`."""
        self._given_up.add(request_id)

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
        described = super().build_connector_meta(scheduler_output).requests
        loads = [request for request in described if request.direction == "RETRIEVE"]
        inside, computed = self._ways.begin_step(scheduler_output, loads)
        blocks = [load.op for load in loads]
        return Step(
            [request for request in described if request not in inside],
            inside,
            written_blocks(scheduler_output, blocks, self._group_tokens_per_block),
            scheduler_output.total_num_scheduled_tokens,
            self._sources(described) if self._ways.allows_steps else {},
            computed,
        )

    def _sources(self, described: Iterable[Any]) -> dict[str, list[int]]:
        """Return, by request that stores, its blocks up to the last that is stored."""
        [tokens] = self._group_tokens_per_block
        return {
            request.request_id: self.request_trackers[request.request_id].allocated_block_ids[0][
                : request.op.end // tokens
            ]
            for request in described
            if request.direction == "STORE"
        }

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = WorkerReport()
        self._ways.end_step(connector_output.finished_recving or (), report.speeds)
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
        self._ways.finished(request.request_id)
        self._given_up.discard(request.request_id)
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
