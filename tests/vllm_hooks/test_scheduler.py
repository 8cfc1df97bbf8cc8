"""What the scheduler does after failed loads; end to end in engine/test_server.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from lmcache_xpu.launch.engine_arguments import SCHEDULER
from lmcache_xpu.versions import vllm
from lmcache_xpu.vllm_connector import LMCacheXPUScheduler
from lmcache_xpu.vllm_hooks.scheduler import beginning_anew


def config(*, ahead: bool, **more) -> SimpleNamespace:
    scheduler = SchedulerConfig.default_factory(async_scheduling=ahead, scheduler_cls=SCHEDULER)
    return SimpleNamespace(scheduler_config=scheduler, **more)


@pytest.mark.parametrize(("ahead", "chosen"), [(True, AsyncScheduler), (False, Scheduler)])
def test_it_is_the_class_that_vllm_would_choose(ahead, chosen):
    asked = config(ahead=ahead)
    assert vllm.scheduler_class(asked) is chosen
    assert asked.scheduler_config.get_scheduler_cls() is LMCacheXPUScheduler


@pytest.mark.parametrize("ahead", [True, False])
def test_a_model_of_diffusion_keeps_its_scheduler(ahead):
    module = pytest.importorskip(vllm.DIFFUSION_MODULE)
    chosen = vllm.scheduler_class(config(ahead=ahead, diffusion_config=object()))
    assert chosen is (module.DiffusionAsyncScheduler if ahead else module.DiffusionScheduler)


class Connector:
    def __init__(self):
        self.told = []

    def give_up_hits(self, request_id):
        self.told.append(request_id)

    def load_in_steps(self):
        self.told.append("in steps")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_connectors_to_a_server_are_told_where_requests_begin_anew(monkeypatch, policy):
    class Chosen:
        def __init__(self, vllm_config, connector):
            self.connector = connector
            self.recompute_kv_load_failures = policy == "recompute"
            self.passed = None

        def _handle_invalid_blocks(self, invalid, scheduled):
            self.passed = invalid
            return {"vLLM's"}

    monkeypatch.setattr(vllm, "scheduler_class", lambda _: Chosen)
    theirs, ours = SimpleNamespace(), Connector()
    several = SimpleNamespace(_connectors=[theirs, ours])
    scheduler = LMCacheXPUScheduler(vllm_config=None, connector=several)
    assert isinstance(scheduler, Chosen)
    assert ours.told == (["in steps"] if policy == "recompute" else [])
    scheduler.recompute_kv_load_failures = False
    assert scheduler._handle_invalid_blocks({1}, {}) == {"vLLM's"}
    assert scheduler.passed == {1}


BLOCKS = 12


class Running:
    """What is asked of vLLM's, with the blocks of its running requests."""

    def __init__(self, connector, running, policy="recompute", groups=1):
        self.connector = connector
        self.running = [SimpleNamespace(request_id=name) for name in running]
        self.recompute_kv_load_failures = policy == "recompute"
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None] * groups)
        self.prev_step_scheduled_req_ids = set(running)
        self.waiting = []
        self.kv_holding_waiting = []
        self.failed_recving_kv_req_ids = set()
        self.evicted = set()
        hashed = [SimpleNamespace(block_hash=number) for number in range(BLOCKS)]
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda request_id: self._groups_of(running[request_id]),
            evict_blocks=self.evicted.update,
            block_pool=SimpleNamespace(blocks=hashed),
        )

    @staticmethod
    def _groups_of(blocks):
        return blocks if isinstance(blocks, tuple) else (blocks,)

    def wait(self, blocks, *, asking=()):
        """Let requests wait for their loads, with these blocks; some are looked up instead."""
        for name in blocks:
            status = "WAITING" if name in asking else "WAITING_FOR_REMOTE_KVS"
            self.kv_holding_waiting.append(
                SimpleNamespace(
                    request_id=name,
                    num_computed_tokens=256,
                    status=getattr(RequestStatus, status),
                )
            )
        get = self.kv_cache_manager.get_block_ids
        self.kv_cache_manager.get_block_ids = lambda name: (
            self._groups_of(blocks[name]) if name in blocks else get(name)
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
    scheduler = Running(several if among_others else ours, RUNNING)
    assert handle(scheduler, {2}) == {"first", "sharing"}
    assert scheduler.waiting == ["first", "sharing"]  # in the order in which they came
    assert [request.request_id for request in scheduler.running] == ["other"]
    assert sorted(ours.given_up) == ["first", "sharing"]
    assert scheduler.prev_step_scheduled_req_ids == {"other"}


def test_what_was_computed_from_a_missing_block_is_not_found_by_its_hash():
    scheduler = Running(Ours(), RUNNING)
    handle(scheduler, {2})
    assert scheduler.evicted == {2, 3, 6}


def test_of_a_request_that_is_gone_nothing_is_known_so_nothing_is_found():
    scheduler = Running(Ours(), RUNNING)
    assert handle(scheduler, {9}) == set()
    assert scheduler.evicted == set(range(BLOCKS))
    assert len(scheduler.running) == len(RUNNING)


def test_blocks_of_a_load_that_is_still_waited_for_are_left_to_vllm():
    """It gives them their hash when all has come."""
    scheduler = Running(Ours(), RUNNING)
    scheduler.kv_cache_manager.block_pool.blocks[9].block_hash = None
    assert handle(scheduler, {2, 9}) == {"first", "sharing", "from the original"}
    assert scheduler.passed == {9}


@pytest.mark.parametrize(
    "scheduler",
    [
        Running(None, RUNNING),
        Running(SimpleNamespace(_connectors=[SimpleNamespace()]), RUNNING),
        Running(Ours(), RUNNING, policy="fail"),
    ],
    ids=["no connector", "others alone", "the policy fail"],
)
def test_what_is_not_ours_is_passed_on(scheduler):
    assert handle(scheduler, {2}) == {"from the original"}
    assert scheduler.passed == {2}
    assert len(scheduler.running) == len(RUNNING)
    assert not scheduler.evicted


OLDER, NEWER = "skipped_waiting", "kv_holding_waiting"


@pytest.mark.parametrize("queue", [OLDER, NEWER])
def test_of_several_groups_a_waiting_request_whose_load_failed_is_computed_anew(queue):
    """vLLM before 0.30 would end the engine; newer names requests, not blocks."""
    scheduler = Running(Ours(), {}, groups=2)
    blocks = {"failed": ([1], [7]), "loading": ([2], [8]), "asking": ([3], [9])}
    scheduler.wait(blocks, asking=["asking"])
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        block.block_hash = None  # until all has come
    waiting = scheduler.kv_holding_waiting
    if queue == OLDER:
        del scheduler.kv_holding_waiting
        scheduler.skipped_waiting = waiting
    assert handle(scheduler, {7, 9}) == set()
    assert scheduler.failed_recving_kv_req_ids == {"failed"}
    computed = {each.request_id: each.num_computed_tokens for each in waiting}
    assert computed == {"failed": 0, "loading": 256, "asking": 256}
    assert not hasattr(scheduler, "passed")
    assert not scheduler.evicted


@pytest.mark.parametrize("groups", [1, 2])
def test_who_waits_with_blocks_of_another_s_failed_load_begins_anew(groups):
    """It has them by their hashes, and was to load what follows."""
    scheduler = Running(Ours(), {"first": ([1, 2], [5])[:groups]}, groups=groups)
    scheduler.wait({"sharing": ([1, 3], [6])[:groups], "other": ([4], [7])[:groups]})
    assert handle(scheduler, {1, 2}) == {"first"}
    assert scheduler.failed_recving_kv_req_ids == {"sharing"}


def test_of_several_groups_all_that_have_a_missing_block_begin_anew_and_nothing_is_found():
    """Blocks that were computed from it may have left the window, and still have their hashes."""
    ours = Ours()
    running = {"first": ([1, 2], [0, 5]), "other": ([3], [6]), "sharing": ([1, 4], [0, 7])}
    scheduler = Running(ours, running, groups=2)
    assert handle(scheduler, {1, 2}) == {"first", "sharing"}
    assert sorted(ours.given_up) == ["first", "sharing"]
    assert scheduler.evicted == set(range(BLOCKS))
    assert not hasattr(scheduler, "passed")


def test_of_several_groups_nothing_else_is_forgotten_while_the_window_holds_all():
    """Of a group whose part of the load is not known, all blocks."""
    running = {"first": ([1, 2, 8], [4, 5, 9], [10, 11]), "other": ([3], [6], [7])}
    scheduler = Running(Ours(), running, groups=3)
    assert handle(scheduler, {2, 5}) == {"first"}
    assert scheduler.evicted == {2, 8, 5, 9, 10, 11}


def test_of_one_group_with_a_window_nothing_is_found_either():
    scheduler = Running(Ours(), {"first": [0, 0, 2, 3]})
    assert handle(scheduler, {2}) == {"first"}
    assert scheduler.evicted == set(range(BLOCKS))
