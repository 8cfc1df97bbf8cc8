"""The scheduler's half of the connector to LMCache's server.

arrived         a request has come: the server begins to look
matched_tokens  FIND: how many tokens the server has; CHOOSE: what becomes of them
allocated       a request has its blocks
describe        DESCRIBE: what the workers load and store in a step
end_step        what the workers report
finished        a request has ended
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from lmcache_xpu.cache.protocol import Cache, TokenRange
from lmcache_xpu.connector.hit_ways import HitWays
from lmcache_xpu.connector.keys import Keys
from lmcache_xpu.connector.kv_events import KVEvents
from lmcache_xpu.connector.load_policy import LoadPolicy
from lmcache_xpu.connector.promises import Promises
from lmcache_xpu.connector.request_guard import guarded
from lmcache_xpu.connector.shared_loads import SharedLoads
from lmcache_xpu.connector.step import Step, WorkerReport, written_blocks
from lmcache_xpu.connector.step_metadata import without
from lmcache_xpu.connector.tracked_request import (
    BlockSizes,
    ChunkNames,
    Stage,
    TrackedRequest,
)
from lmcache_xpu.model.kv_cache_groups import block_tokens
from lmcache_xpu.transfer.tuning import tuning_of
from lmcache_xpu.vllm_hooks.garbage import GarbageCollection
from lmcache_xpu.vllm_hooks.near_worker import near_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_xpu.connector.worker_half import WorkerHalf

__all__ = ["SchedulerHalf"]

LOADS, ANSWERS = "xpu.loads", "lmcache.mp.save_decode_cache"
KEPT_FREE = 0.05  # of all blocks; vLLM may keep some for requests that run


class SchedulerHalf:
    """Told of requests and steps by vLLM's scheduler.

    Args:
        config: of the engine.
        kv_cache_config: of its KV cache.
        options: of the connector.
        client: of the server.
        groups: number of KV cache groups that are stored.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: Mapping[str, Any],
        client: Cache,
        groups: int,
    ) -> None:
        sizes = BlockSizes.of(config, block_tokens(kv_cache_config), client.chunk_tokens)
        self.collection = GarbageCollection()
        self.ways = HitWays()
        self.promises = Promises(sizes.block_tokens[0] if groups == 1 else None)
        self._config = config
        self._client = client
        self._sizes = sizes
        self._lookups = client.lookups()
        self._events = KVEvents.of_engine(config, client.local, kv_cache_config)
        self._keys = Keys(config, kv_cache_config, client.chunk_tokens)
        self._requests: dict[str, TrackedRequest] = {}
        self._untold: list[TrackedRequest] = []  # whose loads no worker knows yet
        self._given_up: set[str] = set()  # requests for which nothing is looked up
        self._pool: BlockPool | None = None
        self._hashed_tokens = self._sizes.block_tokens[0]  # of a block that vLLM hashes
        self._shared = SharedLoads()
        # Of several groups some need the end of a prefix alone.
        self._shares = groups == 1 and getattr(config.cache_config, "enable_prefix_caching", False)
        self._loads = options.get(LOADS, "auto")
        self._stores_answers = bool(options.get(ANSWERS, False))
        self._stores = config.kv_transfer_config.is_kv_producer
        # Engines that share requests may compute in step: one that waits holds the others up.
        self._has_other_engines = config.parallel_config.data_parallel_size > 1
        # Of several ranks the others would store what came of a load that failed on one. Where vLLM
        # zeroes blocks it may do so after a load has begun. And of several groups' blocks it can't
        # be told that they were left unfilled.
        self._may_load_in_steps = (
            config.parallel_config.world_size == 1
            and not kv_cache_config.needs_kv_cache_zeroing
            and len(kv_cache_config.kv_cache_groups) == groups == 1
        )

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        self._keys.bind(pool)
        self._pool = pool
        self._hashed_tokens = getattr(pool, "hash_block_size", self._hashed_tokens)

    def load_in_steps(self) -> None:
        """Let loads be inside steps, where they can: requests whose load fails begin anew."""
        if self._may_load_in_steps:
            policy = LoadPolicy(self._loads, tuning_of(current_platform.device_type))
            self.ways.allow_steps(policy)

    # Requests

    def arrived(self, request: Request) -> None:
        """Begin to look a request up that has come, while vLLM schedules those before it."""
        # What a session goes on with is not clear yet, nor which epoch vLLM's own blocks are of.
        if not (
            request.skip_reading_prefix_cache
            or getattr(request, "resumable", False)
            or self._keys.is_mixed
        ):
            self._lookups.begin(self._tracked(request, 0).whole_chunks())

    def matched_tokens(self, request: Request, kept: int) -> tuple[int | None, bool]:
        """Look a request up.

        Args:
            request: that may be scheduled next.
            kept: number of tokens that vLLM's own prefix cache has.

        Returns:
            The number of tokens that can be loaded beyond those, and whether the request waits for
            them. None if it is to be asked again: the server still looks, or another request
            loads what it lacks first.
        """
        name = request.request_id
        self._shared.end(name)  # nothing of its load has arrived, if there was one
        if name in self.promises.broken:
            return 0, False
        (self._worker or self).collection.put_off()  # until the step is enqueued
        tracked = self._tracked(request, kept)
        if tracked.stage is not Stage.LOOKED_UP and tracked.hit:
            # Nothing of its load has arrived, and vLLM begins it again.
            self._given_up.add(name)
            self._lookups.forget(name)
            tracked = self._requests[name] = self._new(request, kept)
        # It must compute its whole prompt, or a load of it has failed.
        if request.skip_reading_prefix_cache or name in self._given_up:
            return 0, False
        if self._shared.shares(request, kept, self._hashed_tokens):
            return None, True
        is_alone = self.ways.is_alone(name) and not self._has_other_engines
        hit = self._lookups.find(tracked.whole_chunks(), is_alone=is_alone)
        if hit is None:
            return None, True
        tracked.looked_up(hit, kept)
        # Of a whole prompt the last token is computed.
        tokens = max(0, hit - kept - tracked.is_whole_hit)
        if not tokens:
            return 0, False
        way = self.ways.choose(request, kept, tokens)
        if way == "computed":
            return 0, False
        if way == "step" and self._has_blocks_for(request):
            self._ask_early(tracked)
        self.promises.promise(name, kept, waits=way == "async")
        return tokens, way == "async"

    def give_up_hits(self, request_id: str) -> None:
        """Look a request up no more: a load inside a step, or a look-up, has failed."""
        self._given_up.add(request_id)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Take a request's blocks: it will be in the next step, or waits for its load.

        Args:
            request: that was looked up.
            blocks: all of its blocks.
            tokens: number of tokens to load.
        """
        name = request.request_id
        ids = blocks.get_block_ids()
        self.promises.allocated(name, ids[0] if ids else (), tokens)
        if name in self.promises.broken:
            return
        tracked = self._requests[name]
        tracked.allocated(ids)
        if tracked.stage is not Stage.LOOKED_UP:
            self._shared.end(name)
            return
        loads = tokens > 0 and tracked.load() is not None
        tracked.stage = Stage.LOADING if loads else Stage.COMPUTED
        self._lookups.forget(name)
        end = tracked.kept if loads else tracked.hit
        self._lookups.release(tracked.range(0, end), tracked.hit)
        if not loads:
            return
        in_step = self.ways.is_in_step(name)
        if not (in_step and self._ask_early(tracked)):
            self._untold.append(tracked)
        if self._shares and not in_step:
            self._shared.begin(request, tracked.kept, tracked.hit)

    def finished(self, request: Request) -> None:
        """Forget a request. Its blocks may be freed at once; see `Transfers.let_write`."""
        name = request.request_id
        self._requests.pop(name, None)
        self._keys.finished(name)
        self.ways.finished(name)
        self._shared.end(name)
        self._given_up.discard(name)
        self.promises.finished(name)
        self._lookups.end(name)

    def _tracked(self, request: Request, kept: int) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        is_anew = request.status == RequestStatus.PREEMPTED
        if tracked is None or (is_anew and tracked.stage is not Stage.LOOKED_UP):
            tracked = self._requests[request.request_id] = self._new(request, kept)
        return tracked

    def _new(self, request: Request, kept: int) -> TrackedRequest:
        salt, names = self._keys.admit(request, kept), None
        if (local := self._client.local) is not None:
            names = ChunkNames(request, local.prompt_keys(salt), self._sizes, self._hashed_tokens)
        tracked = TrackedRequest(request, salt, self._sizes, names)
        if not (self._stores and self._keys.may_store(request.request_id)):
            tracked.most_stored = 0
        return tracked

    def _has_blocks_for(self, request: Request) -> bool:
        """Whether vLLM will take a request into this step for sure.

        A question that is ended because it did not takes the look-up's locks with it.
        """
        if self._pool is None or request.mm_features:  # an encoder may have no room for these
            return False
        if not self._config.scheduler_config.enable_chunked_prefill:  # a step may have none
            return False
        [size] = self._sizes.block_tokens
        free = self._pool.get_num_free_blocks() - KEPT_FREE * self._pool.num_gpu_blocks
        return bool(free * size >= request.num_tokens)  # its own prefix is among the free

    # Steps

    def describe(self, output: SchedulerOutput) -> Step:
        """Return what the workers must know of a step."""
        self._lookups.end_step()
        self._forget_broken()
        for request_id in self._keys.outdated():  # an adapter's files have changed
            self._store_no_more(request_id)
        loads = self._take_loads()
        stores = list(self._stores_of(without(output, self.promises.broken)))
        begun = self.ways.begin_step(output, loads)
        step = Step(
            written_blocks(output, loads, self._sizes.block_tokens),
            output.total_num_scheduled_tokens,
            stores,
            begun.inside,
            [load for load in loads if load not in begun.inside],
            self._sources(stores) if self.ways.allows_steps else {},
            begun.computed_hits,
            begun.number,
            self.promises.describe(),
            self._keys.epoch,
        )
        self._untold.clear()
        if step.loads and (worker := self._worker) is not None:
            with guarded("begin_early"):  # else `begin_step` asks for all of it
                worker.begin_early(step)
        self.collection.allow()  # a worker in this process has a step of its own to enqueue
        return step

    def describe_failed(self, output: SchedulerOutput) -> Step:
        """Return what the workers must know of a step whose description failed: no transfers."""
        self.promises.fail_step(output.num_scheduled_tokens)
        self._forget_broken()
        untold, self._untold = self._untold, []
        for tracked in untold:  # no load gives these locks back
            with guarded("build_connector_meta"):
                self._lookups.release(tracked.unloaded(), tracked.hit)
        self.collection.allow()
        return Step(
            written_blocks(output, [], self._sizes.block_tokens),
            output.total_num_scheduled_tokens,
            unserved=self.promises.describe(),
            epoch=self._keys.epoch,
        )

    def end_step(self, report: WorkerReport, arrived: Iterable[str]) -> None:
        """Take what the workers report after a step, and whose loads have ended."""
        self.ways.end_step(report.step, arrived, report.speed)
        if report.outdated >= self._keys.epoch:
            self.reset()
        for request_id in report.damaged:
            self._keys.damaged(request_id)
        for request_id in report.requests:
            self._store_no_more(request_id)  # what failed would count as stored

    def reset(self) -> bool:
        """Let nothing be found any more that was stored before; see `keys`.

        Returns:
            False if the server did not give back the room of what was stored.
        """
        self._keys.reset()
        if self._events is not None:
            self._events.clear(self._requests.values())
        for request_id, tracked in list(self._requests.items()):
            tracked.most_stored = 0
            if tracked.stage is Stage.LOOKED_UP:  # it asks again
                self._lookups.give_back(request_id)
                del self._requests[request_id]
        is_drained = (worker := self._worker) is None or worker.drain()
        return self._lookups.reset() and is_drained

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events of the tiers since the last call; see `kv_events`."""
        return () if self._events is None else self._events.take()

    def shutdown(self) -> None:
        """End the connection to the server.

        What has a name of this process's own would never be found again.
        """
        self.collection.allow()
        if self._keys.epoch and self._client.local is not None:
            self._lookups.reset()
        self._client.close()

    def _take_loads(self) -> list[TokenRange]:
        loads = []
        for tracked in self._requests.values():
            if tracked.stage is Stage.LOADING:
                tracked.stage = Stage.COMPUTED
                if (load := tracked.load()) is not None:
                    loads.append(load)
        return loads

    def _stores_of(self, output: SchedulerOutput) -> Iterable[TokenRange]:
        """Yield what a step completes; of a request that goes on, its new blocks are added."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # A resumed request has told all its blocks when it got them.
            if blocks is not None and name not in cached.resumed_req_ids:
                self._requests[name].add_blocks(blocks)
        for name, tokens in computed.items():
            tokens += output.num_scheduled_tokens[name]
            tracked = self._requests[name]
            store = tracked.store(tokens, answers=self._stores_answers)
            if self._events is not None:
                self._events.describe(tracked, self._hashed_tokens)
            if store is not None:
                yield store

    def _sources(self, stores: Iterable[TokenRange]) -> dict[str, list[int]]:
        """Return, by request that stores, its block IDs up to the last that is stored."""
        return {
            store.request_id: self._requests[store.request_id].blocks_to(store.end)
            for store in stores
        }

    def _store_no_more(self, request_id: str) -> None:
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.most_stored = 0

    def _forget_broken(self) -> None:
        for request_id in self.promises.broken:
            self._requests.pop(request_id, None)
            self._shared.end(request_id)

    # A worker in this process

    @property
    def _worker(self) -> WorkerHalf | None:
        """The worker's half of the same engine, where it is in this process."""
        connector = near_connector(self._config)
        return getattr(connector, "worker_half", None)

    def _ask_early(self, tracked: TrackedRequest) -> bool:
        """Ask where the chunks of a hit are, before its step, once; whether somebody is asked."""
        if (worker := self._worker) is None or (load := tracked.load()) is None:
            return False
        worker.ask_early(load)
        return True
