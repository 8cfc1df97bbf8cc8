"""The scheduler's half of the connector: it finds hits, chooses, and describes steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from lmcache_xpu.cache.protocol import Cache, TokenRange
from lmcache_xpu.connector.hit_ends import HitEnds
from lmcache_xpu.connector.keys import Keys
from lmcache_xpu.connector.kv_events import KVEvents
from lmcache_xpu.connector.load_policy import LoadPolicy
from lmcache_xpu.connector.request_guard import Promises, guarded
from lmcache_xpu.connector.step import Step, WorkerReport, may_load_in_steps, written_blocks
from lmcache_xpu.connector.tracked_request import BlockSizes, TrackedRequest
from lmcache_xpu.model.kv_cache_groups import CacheGroup, block_tokens
from lmcache_xpu.transfer.tuning import TUNING
from lmcache_xpu.vllm_hooks.worker_hooks import worker_half

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

LOADS, ANSWERS = "xpu.loads", "lmcache.mp.save_decode_cache"


class SchedulerHalf:
    """Called with requests and steps by vLLM's scheduler; `groups` of the KV cache are stored."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: Mapping[str, Any],
        client: Cache,
        groups: Sequence[CacheGroup],
    ) -> None:
        self.events = KVEvents.of_engine(config, client.local, kv_cache_config)
        self.policy = LoadPolicy(TUNING)
        # Its blocks are freed with their request alone: they tell which requests a load was for.
        self._whole = next((group for group in groups if group.window is None), None)
        self.promises = Promises(None if self._whole is None else self._whole.block_tokens)
        self._config = config
        self._client = client
        self._sizes = BlockSizes.of(config, block_tokens(kv_cache_config), client.chunk_tokens)
        self._lookups = client.lookups(self.policy)
        self._keys = Keys(config, kv_cache_config, client.chunk_tokens)
        # A server does not say where the attention of prompts parts: it keeps all windows.
        kept = groups if client.local else [group for group in groups if group.recurrent]
        self._ends = HitEnds.of(kept, client.chunk_tokens)
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: dict[str, TokenRange] = {}  # of the next step, by request
        self._given_up: set[str] = set()  # requests for which nothing is looked up
        # Requests that wait for loads which others may wait for as well, to take the same blocks.
        self._shared: dict[str, TrackedRequest] = {}
        # Of several groups some need the end of a prefix alone.
        self._shares = len(groups) == 1 and config.cache_config.enable_prefix_caching
        self._stores_answers = bool(options.get(ANSWERS, False))
        self._states = sum(group.recurrent for group in groups)
        is_inside = may_load_in_steps(config, kv_cache_config, groups, is_local=bool(client.local))
        self._chosen_loads: Any = options.get(LOADS, "auto") if is_inside else "async"

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        self._keys.pool = pool
        hashed = getattr(pool, "hash_block_size", self._sizes.hashed_tokens)
        self._sizes = replace(self._sizes, hashed_tokens=hashed)

    def load_in_steps(self) -> None:
        """Let loads be inside steps, where they can: requests whose load fails begin anew."""
        self.policy.loads = self._chosen_loads

    # Requests

    def arrived(self, request: Request) -> None:
        """Begin to look a request up that has come, while vLLM schedules those before it."""
        # What a session goes on with is not clear yet, nor which epoch vLLM's own blocks are of.
        is_clear = not (getattr(request, "resumable", False) or self._keys.is_mixed)
        if is_clear and not request.skip_reading_prefix_cache:
            self._lookups.begin(self._tracked(request, 0).whole_chunks())

    def matched_tokens(self, request: Request, kept: int) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond the `kept` ones of vLLM's own prefix cache.

        And whether the request waits for them. None if vLLM is to ask again: the server still
        looks, or another request loads what it lacks first.
        """
        name = request.request_id
        self._shared.pop(name, None)  # nothing of its load has arrived, if there was one
        if name in self.promises.broken:
            return 0, False
        tracked = self._tracked(request, kept)
        if tracked.has_blocks and tracked.hit:
            # Nothing of its load has arrived, and vLLM begins it again.
            self._given_up.add(name)
            self._lookups.forget(name)
            tracked = self._tracked(request, kept, anew=True)
        # It must compute its whole prompt, or a load of it has failed.
        if request.skip_reading_prefix_cache or name in self._given_up:
            if self._ends is not None:
                self._ends.begin(request, kept, 0)
            return 0, False
        if any(other.loads_first_of(request, kept) for other in self._shared.values()):
            return None, True
        # Engines that share requests may compute in step: one that waits holds the others up.
        has_other_engines = self._config.parallel_config.data_parallel_size > 1
        is_alone = self.policy.is_alone(name) and not has_other_engines
        chunks = tracked.whole_chunks()
        if (hit := self._lookups.find(chunks, is_alone=is_alone)) is None:
            return None, True
        tracked.looked_up(hit, kept)
        if self._ends is not None:
            shared = self._lookups.shared(chunks) if hit < chunks.end else hit
            self._ends.begin(request, max(hit, kept), shared)
        # Of a whole prompt the last token is computed.
        tokens = hit - kept - (hit == request.num_tokens)
        if tokens <= 0 or (mode := self.policy.choose(request, kept, tokens)) == "computed":
            return 0, False
        waits = mode == "async" or (self._states > 0 and not self._has_room(request))
        tracked.in_step = not waits
        self.promises.promise(name, kept, waits=waits)
        return tokens, waits

    def _has_room(self, request: Request) -> bool:
        """Whether vLLM has all blocks of a request whose states are loaded inside its step.

        Its scheduler counts the state that the step writes and not that of the hit, in each group;
        one block too few would end the engine.
        """
        if (pool := self._keys.pool) is None or (whole := self._whole) is None:
            return False
        of_states = self._states * (3 + (self._config.num_speculative_tokens or 0))
        attention = len(self._sizes.block_tokens) - self._states
        needed = attention * -(-request.num_tokens // whole.block_tokens) + of_states
        return bool(pool.get_num_free_blocks() >= needed)

    def give_up_hits(self, request_id: str) -> None:
        """Look a request up no more: a load inside a step, or a look-up, has failed."""
        self._given_up.add(request_id)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Take all blocks of a request: it is in the next step, or waits to have tokens loaded."""
        name = request.request_id
        ids = blocks.get_block_ids()
        whole = ids[self._whole.number] if ids and self._whole is not None else ()
        self.promises.allocated(name, whole, tokens)
        if name in self.promises.broken:
            return
        self._shared.pop(name, None)
        tracked = self._requests[name]
        tracked.allocated(ids)
        if tracked.has_blocks:
            return
        tracked.has_blocks = True
        load = tracked.load() if tokens > 0 else None
        self._lookups.forget(name)
        end = tracked.hit if load is None else tracked.kept
        self._lookups.release(tracked.range(0, end), tracked.hit)
        if load is not None:
            self._loads[name] = load
            if self._shares and not tracked.in_step:
                self._shared[name] = tracked

    def finished(self, request: Request) -> None:
        """Forget a request. Its blocks may be freed at once; see `Transfers.let_write`."""
        name = request.request_id
        for requests in (self._requests, self._loads, self._shared):
            requests.pop(name, None)
        self._given_up.discard(name)
        self._keys.finished(name)
        self.policy.finished(name)
        if self._ends is not None:
            self._ends.finished(name)
        self.promises.finished(name)
        self._lookups.end(name)

    def _tracked(self, request: Request, kept: int, *, anew: bool = False) -> TrackedRequest:
        name, local = request.request_id, self._client.local
        tracked = self._requests.get(name)
        is_preempted = request.status == RequestStatus.PREEMPTED
        if anew or tracked is None or (tracked.has_blocks and is_preempted):
            salt, may_store = self._keys.admit(request, kept)
            keys = None if local is None else local.prompt_keys(salt)
            tracked = self._requests[name] = TrackedRequest(request, salt, self._sizes, keys)
            if not (may_store and self._config.kv_transfer_config.is_kv_producer):
                tracked.most_stored = 0
        return tracked

    # Steps

    def describe(self, output: SchedulerOutput) -> Step:
        """Return what the workers must know of a step."""
        self._lookups.end_step()
        self._forget_broken()
        self._store_no_more(self._keys.outdated())  # an adapter's files have changed
        inside = {name: load for name, load in self._loads.items() if self._requests[name].in_step}
        waiting = {name: load for name, load in self._loads.items() if name not in inside}
        stores = list(self._stores_of(output))
        sources = {}
        if self.policy.loads != "async" and (whole := self._whole) is not None:
            for store in stores:
                blocks = self._requests[store.request_id].blocks[whole.number]
                sources[store.request_id] = blocks[: store.end // whole.block_tokens]
        if self._states and inside and (zeroed := output.new_block_ids_to_zero):
            # What loads fill is not to be zeroed behind them; vLLM's interface allows it.
            filled = {block for load in inside.values() for ids in load.blocks for block in ids}
            zeroed[:] = [block for block in zeroed if block not in filled]
        number, computed_hits = self.policy.begin_step(output, inside, waiting)
        step = Step(
            written_blocks(output, self._sizes.block_tokens, self._loads.values()),
            output.total_num_scheduled_tokens,
            stores,
            list(inside.values()),
            list(waiting.values()),
            sources,
            computed_hits,
            number,
            self.promises.describe(),
            self._keys.epoch,
        )
        self._loads.clear()
        if step.loads and (worker := worker_half(self._config)) is not None:
            with guarded("begin_ahead"):  # else `begin_step` asks for all of it
                worker.begin_ahead(step)
        return step

    def describe_failed(self, output: SchedulerOutput) -> Step:
        """Return what the workers must know of a step whose description failed: no transfers."""
        self.promises.fail_step(output.num_scheduled_tokens)
        self._forget_broken()
        written = written_blocks(output, self._sizes.block_tokens)
        tokens, unserved = output.total_num_scheduled_tokens, self.promises.describe()
        return Step(written, tokens, unserved=unserved, epoch=self._keys.epoch)

    def end_step(self, report: WorkerReport, arrived: Iterable[str]) -> None:
        """Take what the workers report after a step, and whose loads have ended."""
        self.policy.end_step(report.step, arrived, report.speed)
        if report.outdated >= self._keys.epoch:
            self.reset()
        for request_id in report.damaged:
            self._keys.damaged(request_id)
        self._store_no_more(report.requests)  # what failed would count as stored

    def reset(self) -> bool:
        """Let nothing be found any more that was stored; False if the server keeps its room."""
        self._keys.reset()
        if self.events is not None:
            self.events.clear(self._requests.values())
        for request_id, tracked in list(self._requests.items()):
            tracked.most_stored = 0
            if not tracked.has_blocks:  # it asks again
                self._lookups.give_back(request_id)
                del self._requests[request_id]
        is_drained = (worker := worker_half(self._config)) is None or worker.drain()
        return self._lookups.reset() and is_drained

    def shutdown(self) -> None:
        """End the connection to the server."""
        if self._keys.epoch and self._client.local is not None:
            self._lookups.reset()  # keys of this process's own would never be found again
        self._client.close()

    def _stores_of(self, output: SchedulerOutput) -> Iterable[TokenRange]:
        """Yield what a step completes; of a request that goes on, its new blocks are added."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new_blocks = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        for name, tokens in computed.items():
            if name in self.promises.broken:
                continue
            tracked = self._requests[name]
            # A resumed request has had all its blocks when it was allocated.
            if (blocks := new_blocks.get(name)) and name not in cached.resumed_req_ids:
                tracked.add_blocks(blocks)
            end = tokens + output.num_scheduled_tokens[name]
            if self._ends is not None:
                self._ends.go_on(tracked.request, end)
            store = tracked.store(end, answers=self._stores_answers)
            if self.events is not None:
                self.events.describe(tracked)
            if store is not None:
                yield store if self._ends is None else self._ends.kept(store)

    def _store_no_more(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.most_stored = 0

    def _forget_broken(self) -> None:
        for name in self.promises.broken:
            self._requests.pop(name, None)
            self._shared.pop(name, None)
            if (load := self._loads.pop(name, None)) is not None:  # no worker gives its locks back
                with guarded("build_connector_meta"):
                    self._lookups.release(load, load.end)
