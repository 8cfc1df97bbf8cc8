"""The scheduler's half: what it does for LMCache's adapter."""

from __future__ import annotations

from types import SimpleNamespace

from lmcache_xpu.kv_connector.scheduler import SchedulerSide


def step(resumed: set[str]) -> SimpleNamespace:
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=resumed
    )
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, total_num_scheduled_tokens=0
    )


def test_blocks_that_the_worker_adds_to_a_resumed_request_are_not_added_twice():
    """In one process LMCache's tracker and vLLM's worker hold one list, and both extend it."""
    blocks = [7, 8]
    tracker = SimpleNamespace(allocated_block_ids=blocks)
    adapter = SimpleNamespace(lookup_client=None, _request_trackers={"resumed": tracker})
    side = SchedulerSide(adapter, SimpleNamespace(), block_size=16)
    side.describe(SimpleNamespace(requests=[]), step({"resumed", "another connector's"}))
    blocks.append(9)  # the worker's
    assert tracker.allocated_block_ids == [7, 8]
