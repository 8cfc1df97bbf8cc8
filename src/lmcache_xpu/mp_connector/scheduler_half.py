"""The scheduler's half of the connector to LMCache's server: keys, and what becomes of hits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform

from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.load_policy import LoadPolicy
from lmcache_xpu.kv_connector.promises import Promises
from lmcache_xpu.kv_connector.request_guard import ServedRequest, guarded
from lmcache_xpu.kv_connector.step_metadata import without
from lmcache_xpu.mp_connector.adapters import SERVER_URLS, arguments_of
from lmcache_xpu.mp_connector.hit_ways import HitWays
from lmcache_xpu.mp_connector.keys import Keys
from lmcache_xpu.mp_connector.near_loads import NearLoads
from lmcache_xpu.mp_connector.scheduler_adapter import SchedulerAdapter
from lmcache_xpu.mp_connector.step import Step, WorkerReport, written_blocks
from lmcache_xpu.transfer.tuning import tuning_of
from lmcache_xpu.versions.lmcache_server import (
    LMCacheMPConnector,
    LMCacheMPRequestState,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_xpu.mp_connector.kv_cache_groups import CacheGroup

__all__ = ["SchedulerHalf"]

LOADS = "xpu.loads"
KEPT_FREE = 0.05  # of all blocks; vLLM may keep some for requests that run


class SchedulerHalf(LMCacheMPConnector):  # type: ignore[misc]  # untyped base
    """What vLLM's scheduler calls, and this package has otherwise than LMCache."""

    scheduler_adapter: SchedulerAdapter
    _pool: BlockPool | None = None

    def start_scheduler(
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
            options: of this connector.
            groups: of the KV cache that are stored.
        """
        self.collection = GarbageCollection()
        chunk_tokens = self.scheduler_adapter.lmcache_tokens_per_chunk
        self._keys = Keys(config, kv_cache_config, chunk_tokens)
        self._computed = 0  # of the request that is looked up
        self._ways = HitWays()
        self._given_up: set[str] = set()  # requests for which nothing is looked up
        self._promises = Promises(self._group_tokens_per_block[0] if len(groups) == 1 else None)
        self._near = NearLoads(
            config, self.request_trackers, chunk_tokens, self._group_tokens_per_block
        )
        self._loads = options.get(LOADS, "auto")
        # Engines that share requests may compute in step: one that waits holds the others up.
        self._has_other_engines = config.parallel_config.data_parallel_size > 1
        # Of several ranks the others would store what came of a load that failed on one. Where vLLM
        # zeroes blocks it may do so after a load has begun. And of several groups' blocks it can't
        # be told that they were left unfilled.
        self._may_load_in_steps = (
            config.parallel_config.world_size == 1
            and not kv_cache_config.needs_kv_cache_zeroing
            and len(kv_cache_config.kv_cache_groups) == len(groups) == 1
        )

    def own_scheduler_adapter(self, stock: Any, options: Mapping[str, Any]) -> SchedulerAdapter:
        """Make our adapter in place of LMCache's, which asks nobody."""
        newer = {}
        if hasattr(stock, "_required_chunk_alignment"):
            newer["required_chunk_alignment"] = stock._required_chunk_alignment
        return SchedulerAdapter(
            server_urls=[options[SERVER_URLS]], **arguments_of(stock, options), **newer
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._keys.bind(gpu_block_pool)
        self._pool = gpu_block_pool

    def load_in_steps(self) -> None:
        """Let loads be inside steps, where they can: requests whose load fails begin anew."""
        if self._may_load_in_steps:
            policy = LoadPolicy(self._loads, tuning_of(current_platform.device_type))
            self._ways.allow_steps(policy)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether in background."""
        for _ in range(2):  # the second time nothing is looked up
            if request.request_id in self._promises.broken:
                break
            with guarded("get_num_new_matched_tokens"):
                matched, waits = self._matched_tokens(request, num_computed_tokens)
                if matched:
                    self._promises.promise(request.request_id, num_computed_tokens, waits=waits)
                return matched, waits
            self._given_up.add(request.request_id)
        return 0, False

    def _matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._computed = num_computed_tokens
        (self._near.worker or self).collection.put_off()  # until the step is enqueued
        # It must compute its whole prompt, or a load of it has failed.
        if request.skip_reading_prefix_cache or request.request_id in self._given_up:
            self._get_or_create_request_tracker(request)
            return 0, False
        is_alone = self._ways.is_alone(request.request_id) and not self._has_other_engines
        self.scheduler_adapter.begin_look_up(
            is_alone=is_alone,
            meanwhile=functools.partial(self._near.name, request.request_id)
            if self._ways.allows_steps
            else None,
        )
        matched: int | None
        matched, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not matched:
            return matched, matched is None
        way = self._ways.choose(request, num_computed_tokens, matched)
        if way == "step" and self._has_blocks_for(request):
            self._near.ask(request.request_id)
        return (0, False) if way == "computed" else (matched, way == "async")

    def _has_blocks_for(self, request: Request) -> bool:
        """Whether vLLM will take a request into this step for sure.

        A question that is ended because it did not takes the look-up's locks with it.
        """
        if self._pool is None or request.mm_features:  # an encoder may have no room for these
            return False
        if not self._vllm_config.scheduler_config.enable_chunked_prefill:  # a step may have none
            return False
        [block_tokens] = self._group_tokens_per_block
        free = self._pool.get_num_free_blocks() - KEPT_FREE * self._pool.num_gpu_blocks
        return bool(free * block_tokens >= request.num_tokens)  # its own prefix is among the free

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step, or waits for its load."""
        ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._promises.allocated(request.request_id, ids, num_external_tokens)
        if request.request_id in self._promises.broken:
            return None
        with guarded("update_state_after_alloc"):
            return self._allocated(request, blocks, num_external_tokens)
        return self._promises.fail([request.request_id])

    def _allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(ServedRequest(request), blocks, num_external_tokens)
        if self._ways.is_computed(request.request_id):
            tracker = self.request_trackers[request.request_id]
            tracker.num_lmcache_hit_tokens = 0  # LMCache would count them as computed by now
        elif self._ways.is_in_step(request.request_id):
            self._near.ask(request.request_id)

    def give_up_hits(self, request_id: str) -> None:
        """A load inside a step failed: from now on its request is computed; see `scheduler`."""
        self._given_up.add(request_id)

    def _get_or_create_request_tracker(self, request: Request) -> Any:
        before = self.request_trackers.get(request.request_id)
        tracker = super()._get_or_create_request_tracker(request)
        if tracker is not before:
            tracker.cache_salt = self._keys.admit(request, self._computed)
            limit = tracker.max_offload_tokens  # as the client sent it
            tracker.max_offload_tokens = max(0, limit) if isinstance(limit, int) else None
            if not self._keys.may_store(request.request_id):
                tracker.max_offload_tokens = 0
        return tracker

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """What the workers must know of a step."""
        self.scheduler_adapter.end_step()
        with guarded("build_connector_meta"):
            self._forget_broken()
            return self._described(scheduler_output)
        self._promises.fail_step(scheduler_output.num_scheduled_tokens)
        self._forget_broken()
        return Step(
            [],
            [],
            written_blocks(scheduler_output, [], self._group_tokens_per_block),
            scheduler_output.total_num_scheduled_tokens,
            {},
            0,
            unserved=self._promises.describe(),
        )

    def _forget_broken(self) -> None:
        for request_id in self._promises.broken:
            self.request_trackers.pop(request_id, None)

    def _described(self, scheduler_output: SchedulerOutput) -> Step:
        for request_id in self._keys.outdated():  # an adapter's files have changed
            if (tracker := self.request_trackers.get(request_id)) is not None:
                tracker.max_offload_tokens = 0
        shown = without(scheduler_output, self._promises.broken)
        described = super().build_connector_meta(shown).requests
        loads = [request for request in described if request.direction == "RETRIEVE"]
        begun = self._ways.begin_step(scheduler_output, loads)
        blocks = [load.op for load in loads]
        step = Step(
            [request for request in described if request not in begun.inside],
            begun.inside,
            written_blocks(scheduler_output, blocks, self._group_tokens_per_block),
            scheduler_output.total_num_scheduled_tokens,
            self._sources(described) if self._ways.allows_steps else {},
            begun.computed_hits,
            begun.number,
            self._promises.describe(),
        )
        self._near.begin(step)
        self.collection.allow()  # a worker in this process has a step of its own to enqueue
        return step

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
        arrived = connector_output.finished_recving or ()
        self._ways.end_step(report.step, arrived, report.speeds)
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
        self._promises.finished(request.request_id)
        with guarded("request_finished"):
            super().request_finished(ServedRequest(request), block_ids)
        return False, None

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
