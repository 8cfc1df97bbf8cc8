"""A scheduler's look-ups, at a server of the same LMCache and of another one."""

from __future__ import annotations

import itertools
import time

import pytest
from prometheus_client import REGISTRY
from support.other_server import OtherServer
from support.until import until

pytest.importorskip("vllm")

from support.server_adapters import WAIT_S, adapter_at

from lmcache_xpu.mp_connector import scheduler_adapter
from lmcache_xpu.mp_connector.scheduler_adapter import SchedulerAdapter
from lmcache_xpu.versions.lmcache_server import LMCacheMPSchedulerAdapter

TOKENS = list(range(600))
LOOKED_UP = 512  # whole chunks


@pytest.fixture
def server():
    with OtherServer("tcp://127.0.0.1:*") as server:
        yield server


@pytest.fixture
def adapter(server):
    with adapter_at([server.url], SchedulerAdapter, 128) as adapter:
        yield adapter


numbers = itertools.count()


def look_up(adapter):
    """Return what a look-up says, as vLLM's scheduler asks for it."""
    name = f"request {next(numbers)}"
    adapter.maybe_submit_lookup_request(name, token_ids=TOKENS)
    while (result := adapter.check_lookup_result(name)) is None:
        time.sleep(0.01)
    adapter.cleanup_lookup_result(name)
    return result


def failures():
    labels = {"direction": "load", "tier": "server", "reason": "server"}
    return REGISTRY.get_sample_value("lmcache_xpu_errors_total", labels)


def test_a_server_that_answers_the_heartbeat_alone_lets_no_second_request_wait(server, adapter):
    before = failures()
    for _ in range(4):
        assert look_up(adapter) == 0
        server.wait_for_heartbeats(2)
    assert server.lookups.count(LOOKED_UP) == 1
    assert server.lookups.count(0) >= 3  # each heartbeat's
    assert not adapter.is_healthy
    assert failures() == before + 1


def test_it_is_asked_again_when_it_answers(server, adapter):
    look_up(adapter)
    server.reads_keys = True
    until(lambda: adapter.is_healthy)
    before = failures()
    look_up(adapter)
    assert server.lookups.count(LOOKED_UP) == 2
    assert failures() == before


def test_an_answer_that_was_on_its_way_when_a_look_up_was_lost_says_nothing(server, adapter):
    server.reads_keys = True
    look_up(adapter)
    server.reads_keys, server.slow_s = False, WAIT_S + 0.1
    server.wait_for_heartbeats(1)  # which is answered after the look-up was given up
    assert look_up(adapter) == 0
    for _ in range(10):
        time.sleep(server.slow_s / 10)
        assert not adapter.is_healthy


def test_a_request_is_waited_for_in_its_first_two_steps(server, adapter, monkeypatch):
    """vLLM asks again with its next step only. Disks take longer; and many may ask at once."""
    polls = []
    check = LMCacheMPSchedulerAdapter.check_lookup_result
    monkeypatch.setattr(
        LMCacheMPSchedulerAdapter,
        "check_lookup_result",
        lambda self, name: (polls.append(name), check(self, name))[1],
    )

    def waits(name):
        polls.clear()
        adapter.maybe_submit_lookup_request(name, token_ids=TOKENS)
        assert adapter.check_lookup_result(name) is None
        return len(polls) > 1

    server.reads_keys = server.fetches = True
    assert waits("fetched")
    assert not waits("beside it")  # the step has waited long enough
    adapter.end_step()
    assert waits("fetched")
    adapter.end_step()
    assert not waits("fetched")
    assert waits("beside it")
    server.fetches = False
    until(lambda: adapter.check_lookup_result("fetched") == 0)
    for patience in ("PATIENCE_S", "PATIENCE_ALONE_S"):
        monkeypatch.setattr(scheduler_adapter, patience, 20.0)
    adapter.end_step()
    adapter.maybe_submit_lookup_request("in memory", token_ids=TOKENS)
    assert adapter.check_lookup_result("in memory") == 0


def test_a_request_that_is_alone_is_waited_for_longer(server, adapter, monkeypatch):
    monkeypatch.setattr(scheduler_adapter, "PATIENCE_S", 0.0)
    for patience in ("PATIENCE_ALONE_S", "PATIENCE_ALL_ALONE_S"):
        monkeypatch.setattr(scheduler_adapter, patience, 20.0)
    server.reads_keys = server.fetches = True
    adapter.maybe_submit_lookup_request("a", token_ids=TOKENS)
    assert adapter.check_lookup_result("a") is None
    adapter.end_step()
    server.fetches = False
    adapter.begin_look_up(is_alone=True)
    assert adapter.check_lookup_result("a") == 0


def test_while_the_server_looks_something_else_is_done_once(server, adapter, monkeypatch):
    for patience in ("PATIENCE_ALONE_S", "PATIENCE_ALL_ALONE_S"):
        monkeypatch.setattr(scheduler_adapter, patience, 20.0)
    server.reads_keys = server.fetches = True
    done = []

    def meanwhile():
        done.append("a")
        server.fetches = False

    adapter.begin_look_up(is_alone=True, meanwhile=meanwhile)
    adapter.maybe_submit_lookup_request("a", token_ids=TOKENS)
    assert adapter.check_lookup_result("a") == 0
    assert done == ["a"]


def test_each_of_several_that_are_alone_is_waited_for(server, adapter, monkeypatch):
    """One that is fetched from a disk leaves time for those behind it, in memory."""
    monkeypatch.setattr(scheduler_adapter, "PATIENCE_ALONE_S", 0.1)
    monkeypatch.setattr(scheduler_adapter, "PATIENCE_ALL_ALONE_S", 20.0)
    server.reads_keys = server.fetches = True
    begin = time.monotonic()
    adapter.begin_look_up(is_alone=True)
    adapter.maybe_submit_lookup_request("fetched", token_ids=TOKENS)
    assert adapter.check_lookup_result("fetched") is None
    assert time.monotonic() - begin < 10
    server.fetches = False
    monkeypatch.setattr(scheduler_adapter, "PATIENCE_ALONE_S", 20.0)
    adapter.maybe_submit_lookup_request("in memory", token_ids=TOKENS)
    assert adapter.check_lookup_result("in memory") == 0


def test_a_loss_that_the_heartbeat_notices_is_counted_once(server, adapter):
    server.reads_keys = True
    look_up(adapter)
    before = failures()
    server.silent = True
    until(lambda: not adapter.is_healthy)
    assert [look_up(adapter) for _ in range(3)] == [0, 0, 0]
    assert failures() == before + 1
