"""A half's connection to the server: what keys name, and whether the server answers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from support.other_server import OtherServer
from support.until import until

pytest.importorskip("vllm")

from support.server_clients import BEAT_S, WAIT_S, client_at

from lmcache_xpu.cache import server_client
from lmcache_xpu.cache.protocol import KeyScope, TokenRange
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.versions.lmcache_server import key_tokens


@pytest.fixture
def server():
    with OtherServer("tcp://127.0.0.1:*") as server:
        yield server


def config(*, rank: int = 0, tensor: int = 1, pipeline: int = 1, **context: int):
    parallel = SimpleNamespace(
        world_size=tensor * pipeline,
        rank=rank,
        tensor_parallel_size=tensor,
        **{"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **context},
    )
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(model="m"))


@pytest.mark.parametrize(
    ("is_mla", "rank", "scope"),
    [
        (False, 3, KeyScope("m", 4, 3, 1, True, 2)),
        (True, 2, KeyScope("m", 2, 1, 2, True, 2)),  # the first rank of the second stage
        (True, 3, KeyScope("m", 2, 1, 2, False, 2)),  # holds the same
    ],
)
def test_what_ranks_hold_alike_has_one_key(monkeypatch, is_mla: bool, rank: int, scope: KeyScope):
    monkeypatch.setattr("lmcache.integration.vllm.utils.mla_only", lambda _: is_mla)
    assert KeyScope.of(config(rank=rank, tensor=2, pipeline=2)) == scope


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_ranks_that_share_out_tokens_are_refused(phase: str):
    name = f"{phase}_context_parallel_size"
    with pytest.raises(SettingsError, match=f"{name}=2"):
        KeyScope.of(config(tensor=2, **{name: 2}))


def test_a_key_names_one_worker_or_all(server):
    with client_at(server.url, 128) as client:
        chunks = TokenRange("r", key_tokens(range(256)), 0, 256, "salt", {"a": 1})
        keys = [client.key(chunks, worker=worker) for worker in (True, False)]
    assert [key.worker_id for key in keys] == [0, None]
    for key in keys:
        assert (key.model_name, key.world_size, key.num_kv_readers) == ("model", 1, 1)
        assert (key.start, key.end, key.request_id, key.cache_salt) == (0, 256, "r", "salt")
        assert key.request_configs == {"a": 1}


def test_a_server_whose_chunks_cut_blocks_is_refused_with_the_fix(server):
    with pytest.raises(SettingsError, match="--chunk-size 96"), client_at(server.url, 96):
        pass


def test_a_server_that_says_nothing_is_refused(server):
    server.silent = True
    with pytest.raises(SettingsError, match="none of LMCache's"), client_at(server.url, 128):
        pass


def test_a_server_that_comes_back_with_other_chunks_is_not_used(server, caplog):
    server.reads_keys = True
    with client_at(server.url, 128) as client:
        client.start_heartbeat(BEAT_S)
        for name in ("get_chunk_size", "negotiate_chunk_size"):
            server._answers[name] = 512
        client.healthy.clear()
        server.wait_for_heartbeats(3)
        assert not client.healthy.is_set()
        assert "chunks of 512 tokens instead of 256" in caplog.text
        for name in ("get_chunk_size", "negotiate_chunk_size"):
            server._answers[name] = 256
        until(client.healthy.is_set)


def test_who_is_told_of_a_server_that_came_back_may_refuse_it(server):
    server.reads_keys = True
    answers, losses = [True, False], []
    with client_at(server.url, 128) as client:
        client.start_heartbeat(BEAT_S, lambda: answers.pop(), lambda: losses.append("lost"))
        client.healthy.clear()
        until(client.healthy.is_set)
    assert answers == []
    assert losses


def test_a_worker_that_was_stopped_registers_again(server, monkeypatch):
    server.reads_keys = True
    registered, clock = threading.Event(), SimpleNamespace(offset=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.offset
    monkeypatch.setattr(server_client, "time", clock)
    with client_at(server.url, 128, wait_s=5.0) as client:
        client.start_heartbeat(BEAT_S, lambda: registered.set() or True)
        server.wait_for_heartbeats(1)
        clock.offset = 120.0
        until(registered.is_set)
        until(client.healthy.is_set)


def test_a_client_that_is_closed_pings_no_more(server):
    with client_at(server.url, 128) as client:
        client.start_heartbeat(WAIT_S)
        server.wait_for_heartbeats(1)
    pings = server.asked.count("ping")
    with client_at(server.url, 128):
        assert server.asked.count("ping") == pings
