"""Which scheduler of vLLM is subclassed; what it does is in engine/test_server.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache_xpu.launch.engine_arguments import SCHEDULER
from lmcache_xpu.versions import vllm
from lmcache_xpu.vllm_connector import LMCacheXPUScheduler


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
