"""A worker's registration and its loss of the server, at one of another LMCache."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, call

import pytest
from support.lending import BLOCK, CHUNK, copies, filled
from support.other_server import POOL, OtherServer
from support.until import until

pytest.importorskip("vllm")

from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from support.server_adapters import WAIT_S, adapter_at

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.mp_connector import worker_adapter
from lmcache_xpu.mp_connector.step import Step
from lmcache_xpu.mp_connector.worker_adapter import WorkerAdapter

REGISTER = "register_kv_cache_engine_driven_context"


@pytest.fixture
def server():
    with OtherServer("tcp://127.0.0.1:*", CHUNK) as server:
        yield server


@pytest.fixture
def adapter(server):
    with adapter_at(server.url, WorkerAdapter, BLOCK) as adapter:
        yield adapter


def register(adapter):
    caches = {"layer": filled(1)}
    adapter.register(caches, [copies(caches)], WAIT_S, draft_layers=0)


def store(adapter):
    event = adapter.create_recorded_event()
    chunk = LoadStoreOp(list(range(CHUNK)), [[3, 4]], 0, CHUNK)
    adapter.submit_store_request("request", chunk, event)


def maps(server):
    """Whether this process maps the memory that the server lends."""
    return server.path.name in Path("/proc/self/maps").read_text()


def test_an_engine_does_not_start_with_a_server_that_answers_no_look_up(adapter, monkeypatch):
    monkeypatch.setattr(worker_adapter, "START_S", WAIT_S)
    with pytest.raises(SettingsError, match="one of the engine's LMCache"):
        register(adapter)


def test_a_server_that_answers_the_heartbeat_alone_is_not_asked_for_transfers(server, adapter):
    server.reads_keys = True
    register(adapter)
    assert server.asked.count(REGISTER) == 1
    server.reads_keys = False
    store(adapter)
    until(lambda: not adapter._health_event.is_set())
    server.wait_for_heartbeats(4)
    assert not adapter.is_healthy
    assert server.asked.count(REGISTER) == 1
    assert server.asked.count("prepare_store") == 1
    server.reads_keys = True
    until(lambda: adapter.is_healthy)
    assert server.asked.count(REGISTER) == 2


def test_memory_of_a_lost_server_is_given_back_when_its_name_is_gone(server, adapter):
    server.reads_keys = True
    register(adapter)
    assert maps(server)
    server.silent = True
    store(adapter)
    until(lambda: not adapter.is_healthy)
    server.wait_for_heartbeats(2)
    assert maps(server)  # it may come back
    server.path.unlink()
    until(lambda: not maps(server))
    store(adapter)  # ends at once
    server.path.touch(mode=0o600)
    server.path.write_bytes(bytes(POOL))
    server.silent = False
    until(lambda: adapter.is_healthy)
    assert maps(server)


def test_a_step_that_was_begun_before_is_not_asked_for_again(adapter):
    in_steps = Mock()
    adapter.transfers = Mock(in_steps=in_steps)
    begun, other = (Step([], [], {3}, 5, {}, 0) for _ in range(2))
    adapter.begin_early(begun)
    adapter.begin_step(begun)
    assert [name for name, *_ in in_steps.mock_calls] == [
        "begin_step",
        "fail",
        "early.end",
        "begin_answered",
        "begin_answered",
    ]
    assert in_steps.begin_answered.call_args_list == [call(5, scheduling=True), call(5)]
    for step in (begun, other):  # nobody has begun them
        in_steps.reset_mock()
        adapter.begin_step(step)
        assert in_steps.begin_step.call_args == call({3})
    adapter.transfers = None
