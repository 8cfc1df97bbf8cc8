"""vLLM's scheduler, in which a request whose load failed begins anew.

vLLM's own scheduler sets a request back to its first missing block and lets it go on. Its newer
model runner, which XPU uses by default, does not follow: it computes the request's tokens at the
wrong places (vllm-project/vllm#49250). And with asynchronous scheduling the next step is enqueued
when the failure is reported: its tokens, computed from the missing blocks, would be given out.

Preemption is right in both runners, with and without asynchronous scheduling: the request's blocks
are given back, its tokens in flight are dropped, and it is scheduled again as if it were new. vLLM
does the same to running requests when its prefix cache is reset.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.versions import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

Handler = Callable[[Any, set[int], Mapping[str, int]], set[str]]


class LMCacheXPUScheduler:
    """Makes a subclass of the scheduler that vLLM would choose: vLLM's option `--scheduler-cls`.

    It lets connectors that have `load_in_steps` load inside steps.
    """

    def __new__(cls, *, vllm_config: VllmConfig, **options: Any) -> Any:
        """Make it; `options` are vLLM's."""
        base: Any = vllm.scheduler_class(vllm_config)

        class Scheduler(base):  # type: ignore[misc]  # known at run time alone
            _handle_invalid_blocks = beginning_anew(base._handle_invalid_blocks)

            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                if self.recompute_kv_load_failures:
                    for connector in _connectors_of(self.connector):
                        if hasattr(connector, "load_in_steps"):
                            connector.load_in_steps()

        return Scheduler(vllm_config=vllm_config, **options)


def beginning_anew(original: Handler) -> Handler:
    """Make the replacement of `Scheduler._handle_invalid_blocks`, or a subclass's.

    It passes to the original what does not concern it: other connectors alone, the policy `fail`,
    and blocks of loads that requests wait for, but of several KV cache groups. There the original
    ends the engine.
    """

    @functools.wraps(original)
    def handle(scheduler: Any, invalid: set[int], scheduled: Mapping[str, int]) -> set[str]:
        connectors = list(_connectors_of(scheduler.connector))
        if not (connectors and scheduler.recompute_kv_load_failures):
            return original(scheduler, invalid, scheduled)
        invalid = set(invalid)  # which waits for the device, once
        several = len(scheduler.kv_cache_config.kv_cache_groups) > 1
        again, stale = _preempt(scheduler, invalid, scheduled)
        for connector in connectors:
            for request_id in again:
                connector.give_up_hits(request_id)
        _fail_waiting(scheduler, invalid if several else invalid & stale)
        if (rest := invalid - stale) and not several:
            return again | original(scheduler, rest, scheduled)
        return again

    return handle


def _connectors_of(connector: Any) -> Iterator[Any]:
    """Yield the connectors of this package: vLLM's one, or among others in its MultiConnector."""
    if hasattr(connector, "give_up_hits"):
        yield connector
    for inner in getattr(connector, "_connectors", ()):
        yield from _connectors_of(inner)


def _fail_waiting(scheduler: Any, invalid: set[int]) -> None:
    """Let requests begin anew that wait for their loads and have one of these blocks.

    Their loads left it unfilled, or another request's from which they took it. vLLM frees all
    blocks of a failed request that has no token computed, and looks it up again.
    """
    from vllm.v1.request import RequestStatus

    for request in vllm.waiting_for_loads(scheduler):
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            if not invalid.isdisjoint(itertools.chain(*groups)):
                request.num_computed_tokens = 0
                scheduler.failed_recving_kv_req_ids.add(request.request_id)


def _preempt(
    scheduler: Any, invalid: set[int], scheduled: Mapping[str, int]
) -> tuple[set[str], set[int]]:
    """Preempt the running requests that have one of these blocks.

    Return their IDs, and their blocks from the first invalid one on. None of these is found by its
    hash any more: what follows an invalid block was computed from it.
    """
    stale: set[int] = set()
    again = []
    has_gone = False  # some of a request's blocks, behind its window
    for request in scheduler.running:
        groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if invalid.isdisjoint(itertools.chain(*groups)):
            continue
        again.append(request)
        for blocks in groups:
            has_gone |= NULL_BLOCK in blocks
            first = next((at for at, block in enumerate(blocks) if block in invalid), 0)
            stale.update(blocks[first:])
    pool = scheduler.kv_cache_manager.block_pool
    if has_gone or any(pool.blocks[block].block_hash is not None for block in invalid - stale):
        # Or the request has ended or was preempted meanwhile. Which blocks it computed from these
        # is not known any more.
        stale.update(range(len(pool.blocks)))
    scheduler.kv_cache_manager.evict_blocks(stale)
    now = time.monotonic()
    for request in reversed(again):  # each goes to the front of the queue
        scheduler.running.remove(request)
        vllm.preempt(scheduler, request, now, scheduled.get(request.request_id, 0))
        # May be scheduled in the very next step: the runner must not take it for one that went on.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    if again:
        logger.warning(
            "%d requests whose KV cache did not arrive begin anew "
            "(docs: troubleshooting#requests-begin-anew)",
            len(again),
        )
    return {request.request_id for request in again}, stale
