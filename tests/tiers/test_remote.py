"""The shared tier inside LMCache's own StorageManager, against a server: two engines, one cache."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time

import pytest
import redis
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.storage_manager import StorageManager
from prometheus_client import REGISTRY
from storage import CHUNK, SHAPE, TOKENS, content, make_key, make_metadata

from lmcache_xpu import remote, settings

PASSWORD = "s3cret"
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="no valkey-server or redis-server here")


class Server:
    """A real server on loopback, with a password."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.client = redis.Redis(port=self.port, password=PASSWORD)
        self.process = None

    def start(self):
        options = ["--port", str(self.port), "--requirepass", PASSWORD, "--save", ""]
        self.process = subprocess.Popen(
            [SERVER, "--bind", "127.0.0.1", *options], stdout=subprocess.DEVNULL
        )
        for _ in range(500):
            try:
                return self.client.ping()
            except redis.ConnectionError:
                time.sleep(0.01)
        return pytest.fail("the server did not start")

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv(remote.PASSWORD_VARIABLE, PASSWORD)
    server = Server()
    server.start()
    yield server
    server.stop()
    server.client.close()


class Engine:
    """What LMCacheEngine does with its storage, on a real StorageManager."""

    def __init__(self, port, pool_chunks=64, metadata=None):
        chosen = settings.Settings.load(
            {"model": "m", "chunk_tokens": TOKENS, "remote_url": f"redis://127.0.0.1:{port}"}
        )
        config = LMCacheEngineConfig.from_defaults(**chosen.lmcache_config())
        config.max_local_cpu_size = pool_chunks * CHUNK / 2**30
        PinMonitor.GetOrCreate(config)
        self.manager = StorageManager(config, metadata or make_metadata(), EventManager())
        self.backend = self.manager.storage_backends["RemoteBackend-shared"]

    def store(self, numbers):
        self.send(numbers)
        self.wait_until_on_their_way(0)

    def send(self, numbers):
        objs = []
        for number in numbers:
            obj = self.manager.allocate(SHAPE, torch.bfloat16, fmt=MemoryFormat.KV_2LTD)
            obj.tensor.copy_(content(number))
            objs.append(obj)
        self.manager.batched_put([make_key(n) for n in numbers], objs)

    def wait_until_on_their_way(self, number):
        end = time.monotonic() + 10
        while (now := len(self.backend.put_tasks)) > number:
            assert time.monotonic() < end, f"{now} chunks are still on their way"
            time.sleep(0.002)

    def found(self, numbers):
        return self.backend.batched_contains([make_key(n) for n in numbers])

    def load(self, number):
        return self.backend.get_blocking(make_key(number))

    def close(self):
        self.manager.close()
        self.manager.loop.close()


@pytest.fixture
def engine(server):
    engines = []

    def make(**options):
        engines.append(Engine(server.port, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


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


def test_a_value_cut_short_is_a_miss_and_costs_no_memory(engine, server):
    first = engine()
    first.store([1])
    [name] = server.client.keys()
    first.store([2])
    server.client.set(name, server.client.get(name)[:-1])
    small = engine(pool_chunks=4)
    assert [small.load(1) for _ in range(4)] == [None] * 4
    obj = small.load(2)
    assert torch.equal(obj.tensor, content(2))
    obj.ref_count_down()


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
    monkeypatch.setattr(remote, "AWAY_S", 0.5)
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
    monkeypatch.setattr(remote.logger, "propagate", True)
    first = engine()
    first.store(range(6))
    server.stop()
    server.start()
    first.store(range(10, 16))
    assert first.found(range(10, 16)) == 6
    assert "left alone" not in caplog.text


def test_a_wrong_password_is_said_and_not_shown(engine, monkeypatch, caplog):
    monkeypatch.setenv(remote.PASSWORD_VARIABLE, "wr0ng")
    monkeypatch.setattr(remote.logger, "propagate", True)
    assert engine().found([1]) == 0
    assert "shared tier: left alone for 10 s: invalid username-password" in caplog.text
    assert "wr0ng" not in caplog.text


def test_the_password_is_the_setting_of_that_name():
    chosen = settings.Settings.load({"model": "m", "remote_password": PASSWORD})
    assert chosen.environment()[remote.PASSWORD_VARIABLE] == PASSWORD
    assert PASSWORD not in " ".join(chosen.vllm_args())
