"""What vLLM's scheduler does with requests whose KV cache did not arrive: it begins them anew.

vLLM's own way sets a request back to its first missing block and lets it go on. Its newer model
runner, which XPU uses by default, does not follow: it computes the request's tokens at the wrong
places (vllm-project/vllm#49250). And with asynchronous scheduling, the next step is on its way when
the failure is reported: its tokens, computed from the missing blocks, would be given out.

Preemption is right in both runners and both ways of scheduling: the request's blocks are given
back, what is under way of it is dropped, and the request is scheduled again as if it were new.
vLLM does the same to running requests when its prefix cache is reset.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_xpu.versions import vllm

__all__ = ["beginning_anew", "connectors_of"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

Handler = Callable[[Any, set[int], Mapping[str, int]], set[str]]


def beginning_anew(original: Handler) -> Handler:
    """Make the replacement of `Scheduler._handle_invalid_blocks`, or a subclass's.

    It passes to the original what does not concern it: other connectors alone, the policy `fail`,
    and requests of other connectors that load asynchronously.
    """

    @functools.wraps(original)
    def handle(scheduler: Any, invalid: set[int], scheduled: Mapping[str, int]) -> set[str]:
        connectors = list(connectors_of(scheduler.connector))
        if not (connectors and scheduler.recompute_kv_load_failures and _has_one_group(scheduler)):
            return original(scheduler, invalid, scheduled)
        again, stale = _preempt(scheduler, invalid, scheduled)
        for connector in connectors:
            for request_id in again:
                connector.give_up_hits(request_id)
        if rest := invalid - stale:
            return again | original(scheduler, rest, scheduled)
        return again

    return handle


def connectors_of(connector: Any) -> Iterator[Any]:
    """Yield the connectors of this package: vLLM's one, or among others in its MultiConnector."""
    if hasattr(connector, "give_up_hits"):
        yield connector
    for inner in getattr(connector, "_connectors", ()):
        yield from connectors_of(inner)


def _preempt(
    scheduler: Any, invalid: set[int], scheduled: Mapping[str, int]
) -> tuple[set[str], set[int]]:
    """Preempt the running requests that have one of these blocks.

    Returns:
        Their names, and their blocks from the first invalid one on. None of these is found by its
        hash any more: what follows an invalid block was computed from it.
    """
    stale: set[int] = set()
    again = []
    for request in scheduler.running:
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        first = next((at for at, block in enumerate(blocks) if block in invalid), None)
        if first is not None:
            stale.update(blocks[first:])
            again.append(request)
    pool = scheduler.kv_cache_manager.block_pool
    if any(pool.blocks[block].block_hash is not None for block in invalid - stale):
        # The request has ended or was preempted meanwhile. Which blocks it computed from these is
        # not known any more.
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


def _has_one_group(scheduler: Any) -> bool:
    return len(scheduler.kv_cache_config.kv_cache_groups) == 1
