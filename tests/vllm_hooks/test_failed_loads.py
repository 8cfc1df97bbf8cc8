"""What the scheduler does with requests whose load failed; end to end in engine/test_engine.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_xpu.vllm_hooks.failed_loads import beginning_anew

BLOCKS = 12


class Scheduler:
    """What is asked of vLLM's, with the blocks of its running requests."""

    def __init__(self, connector, running, policy="recompute", groups=1):
        self.connector = connector
        self.running = [SimpleNamespace(request_id=name) for name in running]
        self.recompute_kv_load_failures = policy == "recompute"
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None] * groups)
        self.prev_step_scheduled_req_ids = set(running)
        self.waiting = []
        self.evicted = set()
        hashed = [SimpleNamespace(block_hash=number) for number in range(BLOCKS)]
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda request_id: (running[request_id],),
            evict_blocks=self.evicted.update,
            block_pool=SimpleNamespace(blocks=hashed),
        )

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        assert drop_stale_output
        self.waiting.insert(0, request.request_id)


class Ours:
    def __init__(self):
        self.given_up = []
        self.give_up_hits = self.given_up.append


def original(scheduler, invalid, scheduled):
    scheduler.passed = invalid
    return {"from the original"}


def handle(scheduler, invalid):
    return beginning_anew(original)(scheduler, invalid, {})


RUNNING = {"first": [1, 2, 3], "other": [4, 5], "sharing": [1, 2, 6]}


@pytest.mark.parametrize("among_others", [False, True])
def test_all_that_have_a_missing_block_begin_anew_and_find_nothing(among_others):
    ours = Ours()
    several = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
    scheduler = Scheduler(several if among_others else ours, RUNNING)
    assert handle(scheduler, {2}) == {"first", "sharing"}
    assert scheduler.waiting == ["first", "sharing"]  # in the order in which they came
    assert [request.request_id for request in scheduler.running] == ["other"]
    assert sorted(ours.given_up) == ["first", "sharing"]
    assert scheduler.prev_step_scheduled_req_ids == {"other"}


def test_what_was_computed_from_a_missing_block_is_not_found_by_its_hash():
    scheduler = Scheduler(Ours(), RUNNING)
    handle(scheduler, {2})
    assert scheduler.evicted == {2, 3, 6}


def test_of_a_request_that_is_gone_nothing_is_known_so_nothing_is_found():
    scheduler = Scheduler(Ours(), RUNNING)
    assert handle(scheduler, {9}) == set()
    assert scheduler.evicted == set(range(BLOCKS))
    assert len(scheduler.running) == len(RUNNING)


def test_blocks_of_a_load_that_is_still_waited_for_are_left_to_vllm():
    """It gives them their hash when all has come."""
    scheduler = Scheduler(Ours(), RUNNING)
    scheduler.kv_cache_manager.block_pool.blocks[9].block_hash = None
    assert handle(scheduler, {2, 9}) == {"first", "sharing", "from the original"}
    assert scheduler.passed == {9}


@pytest.mark.parametrize(
    "scheduler",
    [
        Scheduler(None, RUNNING),
        Scheduler(SimpleNamespace(_connectors=[SimpleNamespace()]), RUNNING),
        Scheduler(Ours(), RUNNING, policy="fail"),
        Scheduler(Ours(), RUNNING, groups=2),
    ],
    ids=["no connector", "others alone", "the policy fail", "several groups"],
)
def test_what_is_not_ours_is_passed_on(scheduler):
    assert handle(scheduler, {2}) == {"from the original"}
    assert scheduler.passed == {2}
    assert len(scheduler.running) == len(RUNNING)
    assert not scheduler.evicted
