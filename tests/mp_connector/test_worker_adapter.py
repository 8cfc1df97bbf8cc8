"""A worker's registration and its loss of the server, at one of another LMCache."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq
from support.lending import BLOCK, CHUNK, copies, filled
from support.other_server import POOL, OtherServer

pytest.importorskip("vllm")

from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp, ParallelStrategy

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.mp_connector import worker_adapter
from lmcache_xpu.mp_connector.worker_adapter import WorkerAdapter

WAIT_S, BEAT_S = 0.3, 0.5
REGISTER = "register_kv_cache_engine_driven_context"


@pytest.fixture
def server():
    with OtherServer("tcp://127.0.0.1:*", CHUNK) as server:
        yield server


@pytest.fixture
def adapter(server):
    parallel = ParallelStrategy(False, 1, 0, 1, 1, 1)
    options = {"lmcache.mp.mq_timeout": WAIT_S, "lmcache.mp.heartbeat_interval": BEAT_S}
    adapter = WorkerAdapter(
        server.url, zmq.Context.instance(), "model", BLOCK, parallel, extra_config=options
    )
    yield adapter
    adapter.shutdown()


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


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


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
    last = server.asked.count("ping") + 4
    until(lambda: server.asked.count("ping") >= last)
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
    last = server.asked.count("ping") + 2
    until(lambda: server.asked.count("ping") >= last)
    assert maps(server)  # it may come back
    server.path.unlink()
    until(lambda: not maps(server))
    store(adapter)  # ends at once
    server.path.write_bytes(bytes(POOL))
    server.silent = False
    until(lambda: adapter.is_healthy)
    assert maps(server)
