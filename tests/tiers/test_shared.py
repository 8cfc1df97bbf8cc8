"""The shared tier inside LMCache's own StorageManager, against a server: two engines, one cache."""

from __future__ import annotations

import signal
import time

import torch
from lmcache.v1.memory_management import MemoryFormat
from prometheus_client import REGISTRY
from support.servers import PASSWORD, needs_server
from support.storage import CHUNK, TOKENS, content, make_metadata

from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers import shared

pytestmark = needs_server


def test_what_one_engine_stores_another_one_finds(engine):
    first, second = engine(), engine()
    first.store(range(8))
    assert second.found(range(10)) == 8
    for number in range(8):
        obj = second.load(number)
        assert torch.equal(obj.tensor, content(number))
        assert (obj.metadata.fmt, obj.get_ref_count()) == (MemoryFormat.KV_2LTD, 1)
        obj.ref_count_down()
    assert second.load(8) is None


def test_what_moves_is_counted(engine):
    def moved(direction):
        labels = {"direction": direction, "tier": "shared"}
        return [
            REGISTRY.get_sample_value(f"lmcache_xpu_{name}_total", labels)
            for name in ("bytes", "tokens")
        ]

    stored, loaded = moved("store"), moved("load")
    first = engine()
    first.store([1, 2])
    first.load(1).ref_count_down()
    assert moved("store") == [stored[0] + 2 * CHUNK, stored[1] + 2 * TOKENS]
    assert moved("load") == [loaded[0] + CHUNK, loaded[1] + TOKENS]


def test_another_layout_finds_nothing(engine):
    engine().store([1])
    other = make_metadata()
    other.kv_shape = (*other.kv_shape[:-1], 128)
    assert engine(metadata=other).found([1]) == 0


def test_a_chunk_is_one_value_so_that_it_is_evicted_as_one(engine, server):
    first = engine()
    first.store([1, 2])
    assert len(server.client.keys()) == 2
    server.client.delete(*server.client.keys()[:1])
    assert first.found([1]) + first.found([2]) == 1


def test_a_chunk_that_is_there_is_not_sent_again(engine, server):
    engine().store([1])
    sent = server.client.info()["total_net_input_bytes"]
    engine().store([1])
    assert server.client.info()["total_net_input_bytes"] - sent < CHUNK // 4


def test_no_room_for_a_chunk_is_a_miss(engine):
    engine().store([1, 2])
    small = engine(pool_chunks=1)
    held = small.load(1)
    assert small.load(2) is None
    held.ref_count_down()


def test_what_is_on_its_way_is_bounded(engine, server):
    small = engine(pool_chunks=8)  # two may be on their way
    server.process.send_signal(signal.SIGSTOP)  # none is there before the last one is sent
    small.send(range(8))
    small.wait_until_on_their_way(2)
    server.process.send_signal(signal.SIGCONT)
    small.wait_until_on_their_way(0)
    assert len(server.client.keys()) == 2


def test_without_a_server_nothing_waits_and_nothing_fails_and_it_comes_back(
    engine, server, monkeypatch
):
    monkeypatch.setattr(shared, "AWAY_S", 0.5)
    first = engine()
    first.store([1])
    server.stop()
    begin = time.monotonic()
    for _ in range(20):
        assert first.found([1]) == 0
        assert first.load(1) is None
    first.store([2])
    assert time.monotonic() - begin < 5
    server.start()
    time.sleep(0.6)
    first.store([3])
    assert first.found([3]) == 1


def test_a_server_that_was_restarted_is_used_at_once(engine, server, caplog, monkeypatch):
    """The pool's connections, several after a store, are closed; nobody is to wait for that."""
    monkeypatch.setattr(shared.logger, "propagate", True)
    first = engine()
    first.store(range(6))
    server.stop()
    server.start()
    first.store(range(10, 16))
    assert first.found(range(10, 16)) == 6
    assert "left alone" not in caplog.text


def test_a_wrong_password_is_said_and_not_shown(engine, monkeypatch, caplog):
    monkeypatch.setenv(shared.PASSWORD_VARIABLE, "wr0ng")
    monkeypatch.setattr(shared.logger, "propagate", True)
    assert engine().found([1]) == 0
    assert "shared tier: left alone for 10 s: invalid username-password" in caplog.text
    assert "wr0ng" not in caplog.text


def test_the_password_is_the_setting_of_that_name():
    settings = Settings.load({"model": "m", "remote_password": PASSWORD})
    assert engine_variables(settings)[shared.PASSWORD_VARIABLE] == PASSWORD
    assert PASSWORD not in " ".join(vllm_arguments(settings))
