"""A worker's registration, its steps, and its loss of the server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from support.lending import BLOCK, BLOCKS, CHUNK, Client, Connection, chunks_of, filled
from support.other_server import POOL, OtherServer
from support.until import until

pytest.importorskip("vllm")

from support.server_clients import BEAT_S, WAIT_S, client_at

from lmcache_xpu.cache import server_client
from lmcache_xpu.cache.hit_places import RESERVE
from lmcache_xpu.connector import worker_half
from lmcache_xpu.connector.request_guard import Unserved
from lmcache_xpu.connector.step import Step
from lmcache_xpu.connector.worker_half import WorkerHalf
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.model.kv_cache_groups import CacheGroup

REGISTER = "register_kv_cache_engine_driven_context"
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]


@pytest.fixture(autouse=True)
def no_drafter(monkeypatch):
    monkeypatch.setattr(worker_half, "calculate_draft_layers", lambda _: 0)


def made(client, *, zeroes: bool = False) -> WorkerHalf:
    group = CacheGroup(number=0, layers=("layer",), block_tokens=BLOCK)
    kv_cache = SimpleNamespace(num_blocks=BLOCKS, needs_kv_cache_zeroing=zeroes)
    options = {"xpu.server_timeout_s": WAIT_S}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    return WorkerHalf(config, kv_cache, options, client, [group], BEAT_S)


@pytest.fixture
def server():
    with OtherServer("tcp://127.0.0.1:*", CHUNK) as server:
        yield server


@pytest.fixture
def half(server):
    with client_at(server.url, BLOCK, instance_id=7) as client:
        half = made(client)
        yield half
        half.shutdown()


def register(half):
    half.register({"layer": filled(1)})


def store(half):
    half.begin_step(Step(frozenset(), 8, [chunks_of(STORED[:2], end=CHUNK)]))
    half.store()


def maps(server):
    """Whether this process maps the memory that the server lends."""
    return server.path.name in Path("/proc/self/maps").read_text()


def test_an_engine_does_not_start_with_a_server_that_answers_no_look_up(half, monkeypatch):
    monkeypatch.setattr(server_client, "START_S", WAIT_S)
    with pytest.raises(SettingsError, match="one of the engine's LMCache"):
        register(half)


def test_a_server_that_answers_the_heartbeat_alone_is_not_asked_for_transfers(server, half):
    healthy = half._client.healthy
    server.reads_keys = True
    register(half)
    assert server.asked.count(REGISTER) == 1
    server.reads_keys = False
    store(half)
    until(lambda: not healthy.is_set())
    server.wait_for_heartbeats(4)
    assert not healthy.is_set()
    assert server.asked.count(REGISTER) == 1
    assert server.asked.count(RESERVE) == 1
    server.reads_keys = True
    until(healthy.is_set)
    assert server.asked.count(REGISTER) == 2


def test_memory_of_a_lost_server_is_given_back_when_its_name_is_gone(server, half):
    healthy = half._client.healthy
    server.reads_keys = True
    register(half)
    assert maps(server)
    server.silent = True
    store(half)
    until(lambda: not healthy.is_set())
    server.wait_for_heartbeats(2)
    assert maps(server)  # it may come back
    server.path.unlink()
    until(lambda: not maps(server))
    store(half)  # ends at once
    server.path.touch(mode=0o600)
    server.path.write_bytes(bytes(POOL))
    server.silent = False
    until(healthy.is_set)
    assert maps(server)


def test_a_step_that_was_begun_before_is_not_asked_for_again():
    in_steps = Mock()
    half = made(Mock())
    half.transfers, half.in_steps = Mock(), in_steps
    begun, other = (Step(frozenset({3}), 5, loads=["a"]) for _ in range(2))
    half.begin_ahead(begun)
    half.begin_step(begun)
    assert [name for name, *_ in in_steps.mock_calls] == [
        "begin_step",
        "fail",
        "ask",
        "begin_answered",
        "begin_answered",
    ]
    assert in_steps.begin_answered.call_args_list == [call(5, scheduling=True), call(5)]
    for step in (begun, other):  # nobody has begun them
        in_steps.reset_mock()
        half.begin_step(step)
        assert in_steps.begin_step.call_args == call({3})


@pytest.fixture
def alone():
    """A worker of an imitated server, and its layer."""
    client, layer = Client(), filled(1)
    connection = Connection(client)
    connection.start_heartbeat = connection.stop_heartbeat = connection.close = Mock()
    half = made(connection)
    half.register({"layer": layer})
    yield half, layer
    half.shutdown()
    client.close()


def run(half, step):
    """A step of vLLM's runner; what it hears behind it."""
    half.begin_step(step)
    half.load(SimpleNamespace(attn_metadata=None), {})
    half.store()
    unfilled, report = set(half.take_unfilled()), half.report()
    half.end_step()
    return unfilled, report


def ended(half):
    seen: set[str] = set()
    failed: set[str] = set()

    def look() -> bool:
        names, some = half.take_ended()
        seen.update(names)
        failed.update(some)
        return bool(names)

    until(look)
    return seen, failed


def test_a_request_that_waits_gets_what_an_earlier_step_stored(alone):
    half, layer = alone
    before = layer.clone()
    assert run(half, Step(frozenset(), 8, [chunks_of(STORED)], number=1))[1].step == 1
    until(lambda: not half.transfers.busy)
    run(half, Step(frozenset(LOADED), 8, waiting=[chunks_of(LOADED)]))
    assert ended(half) == ({"request"}, set())
    assert torch.equal(layer[LOADED], before[STORED])


def test_what_fails_is_told_by_request_and_to_older_vllm_by_block(alone):
    half, _ = alone
    missing = chunks_of(LOADED, kept=2 * BLOCK)
    for by_request in (True, False):
        half._reports_requests = by_request
        run(half, Step(frozenset(), 8, waiting=[missing]))
        assert ended(half) == ({"request"}, {"request"})
        assert set(half.take_unfilled()) == (set() if by_request else set(LOADED[2:]))
        half.transfers.take_unfilled()
        assert half.report().requests == {"request"}


def test_loads_that_nobody_described_count_as_failed(alone):
    half, _ = alone
    unserved = Unserved(frozenset({5}), {"waits": frozenset({6, 7})})
    unfilled, _ = run(half, Step(frozenset(), 8, unserved=unserved))
    assert unfilled == {5}
    assert half.take_ended() == ({"waits"}, {"waits"})


def test_a_rank_that_holds_what_another_stores_stores_nothing(alone, monkeypatch):
    half, _ = alone
    monkeypatch.setattr(half._client.scope, "is_writer", False)
    run(half, Step(frozenset(), 8, [chunks_of(STORED)]))
    assert not half.transfers.busy
    assert RESERVE not in half._client.requests.calls


def test_null_blocks_of_a_window_are_never_named_as_those_of_a_failed_load(alone):
    """Most requests have them: all of these would begin anew."""
    half, _ = alone
    half.change_weights()
    windows = chunks_of([0, 0, 0, 0, *LOADED[4:]])
    unfilled, _ = run(half, Step(frozenset(), 8, loads=[windows]))
    assert unfilled == set(LOADED[4:])
