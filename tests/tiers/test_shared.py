"""The shared tier as an L2 adapter, against a server: two engines, one cache."""

from __future__ import annotations

import signal
import socket
import time

import pytest
import redis
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from prometheus_client import REGISTRY
from support.server_disk import LAYOUT, OBJECT, make_key
from support.servers import PASSWORD, Server, certificate, needs_server
from support.until import until

from lmcache_xpu import tiers
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.engine_arguments import engine_variables, vllm_arguments
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.tiers import PASSWORD_VARIABLE, URL_KEY, shared_l2, shared_values
from lmcache_xpu.tiers.shared_l2 import SharedL2Adapter

TOKENS = 16


@needs_server
def test_what_one_engine_stores_another_one_finds(engine):
    first, second = engine(), engine()
    stored = first.store(range(8))
    assert (stored.is_successful(), stored.bytes_transferred()) == (True, 8 * OBJECT)
    assert second.look_up(range(10)) == list(range(8))
    assert second.load(range(10)) == list(range(8))


@needs_server
def test_with_tls_the_servers_certificate_is_checked_by_the_file_of_the_url(monkeypatch, tmp_path):
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    (ours, key), (others, _) = (certificate(tmp_path / name) for name in ("ours", "others"))
    server = Server(ours)
    tls = ("--tls-port", str(server.port), "--tls-cert-file", str(ours), "--tls-key-file", str(key))
    try:
        server.start(*tls, "--port", "0", "--tls-auth-clients", "no")
        url = f"rediss://127.0.0.1:{server.port}"
        values = shared_values.SharedValues({URL_KEY: f"{url}?ssl_ca_certs={ours}"})
        server.client.set("name", "value")
        assert values.exist(["name", "other"]) == [True, False]
        for wrong in (f"{url}?ssl_ca_certs={others}", url):
            with pytest.raises(redis.ConnectionError, match="verify failed"):
                shared_values.SharedValues({URL_KEY: wrong}).exist(["name"])
    finally:
        server.stop()


@pytest.mark.parametrize(
    "query",
    ["?ssl_cert_reqs=none", "?ssl_ca_certs=/f&ssl_cert_reqs=none", "?ssl_ca_certs=relative"],
)
def test_a_url_turns_no_check_off(query):
    with pytest.raises(SettingsError):
        Settings.load({"model": "m", "remote_url": f"rediss://cache:6379{query}"})
    with pytest.raises(SettingsError):
        shared_values.SharedValues({URL_KEY: f"rediss://cache:6379{query}"})


def test_a_file_of_authorities_goes_with_tls_alone():
    ending = "cache:6379/1?ssl_ca_certs=/etc/ca.crt"
    assert Settings.load({"model": "m", "remote_url": f"rediss://{ending}"}).remote_url
    with pytest.raises(SettingsError):
        Settings.load({"model": "m", "remote_url": f"redis://{ending}"})


@needs_server
def test_results_are_given_out_once(engine):
    first = engine()
    first.store([0])
    task = first.tier.submit_lookup_and_lock_task([make_key(0)], {0: LAYOUT})
    fd = first.tier.get_lookup_and_lock_event_fd()
    result = first.wait(fd, lambda: first.tier.query_lookup_and_lock_result(task))
    assert result.test(0)
    assert first.tier.query_lookup_and_lock_result(task) is None
    assert first.tier.pop_completed_store_tasks() == {}
    descriptors = (first.tier.get_store_event_fd(), fd, first.tier.get_load_event_fd())
    assert len(set(descriptors)) == 3


@needs_server
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
    assert first.load([1]) == [1]
    assert moved("store") == [stored[0] + 2 * OBJECT, stored[1] + 2 * TOKENS]
    assert moved("load") == [loaded[0] + OBJECT, loaded[1] + TOKENS]


@needs_server
@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "another/model"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"object_group_id": 1},
        {"cache_salt": "somebody"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_is_all_of_its_parts(engine, changes):
    first, second = engine(), engine()
    first.store([0])
    assert second.look_up([0], **changes) == second.load([0], **changes) == []
    first.store([0], **changes)
    assert second.load([0], **changes) == [0]


@needs_server
@pytest.mark.parametrize(
    "other",
    [
        MemoryLayoutDesc(LAYOUT.shapes, [torch.float16]),  # of as many bytes
        MemoryLayoutDesc([torch.Size([2, 4, 8, 128])], LAYOUT.dtypes),
        MemoryLayoutDesc([torch.Size([2, 2, 8, 128])], LAYOUT.dtypes),
    ],
)
def test_engines_of_two_layouts_disturb_each_other_in_nothing(engine, other):
    first, second = engine(), engine()
    first.store([0])
    assert second.look_up([0], other) == second.load([0], other) == []
    second.store([0], other)
    assert first.load([0]) == second.load([0], other) == [0]


@needs_server
def test_an_object_is_one_value_so_that_it_is_evicted_as_one(engine, server):
    first = engine()
    first.store([1, 2])
    assert len(server.client.keys()) == 2
    server.client.delete(*server.client.keys()[:1])
    assert len(first.look_up([1, 2])) == 1


@needs_server
def test_an_object_that_went_after_its_look_up_is_a_miss(engine, server):
    first = engine()
    first.store([1, 2])
    assert first.look_up([1, 2]) == [1, 2]
    server.client.flushall()
    assert first.load([1, 2]) == []


@needs_server
def test_an_object_that_is_there_is_not_sent_again(engine, server):
    engine().store([1])
    sent = server.client.info()["total_net_input_bytes"]
    again = engine().store([1])
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    assert server.client.info()["total_net_input_bytes"] - sent < OBJECT // 4


@needs_server
def test_what_is_on_its_way_is_bounded(engine, server):
    small = engine(l1_objects=8)  # two may be on their way
    server.process.send_signal(signal.SIGSTOP)
    first = small.send([0])
    second = small.send(range(1, 7))
    third = small.send([7])
    assert small.tier.report_status()["queued_bytes"] == 2 * OBJECT
    server.process.send_signal(signal.SIGCONT)
    assert small.sent(*first).is_successful()
    assert not small.sent(*second).is_successful()
    assert small.sent(*third).is_successful()
    assert len(server.client.keys()) == 2
    assert small.tier.report_status()["queued_bytes"] == 0


@needs_server
def test_without_a_server_nothing_waits_and_nothing_fails_and_it_comes_back(
    engine, server, monkeypatch
):
    monkeypatch.setattr(shared_l2, "AWAY_S", 0.5)
    first = engine()
    first.store([1])
    server.stop()
    begin = time.monotonic()
    for _ in range(20):
        assert first.look_up([1]) == []
        assert first.load([1]) == []
    assert not first.store([2]).is_successful()
    assert time.monotonic() - begin < 5
    server.start()
    time.sleep(0.6)
    first.store([3])
    assert first.load([3]) == [3]


@needs_server
def test_a_server_that_was_restarted_is_used_at_once(engine, server, caplog, monkeypatch):
    """The client's connections, several after a load, are closed; nobody is to wait for that."""
    monkeypatch.setattr(tiers.LOGGERS["shared"], "propagate", True)
    first = engine()
    first.store(range(6))
    assert first.load(range(6)) == list(range(6))
    server.stop()
    server.start()
    first.store(range(10, 16))
    assert first.load(range(10, 16)) == list(range(10, 16))
    assert "left alone" not in caplog.text


@needs_server
def test_an_end_sends_what_is_queued(engine, server):
    first, second = engine(), engine()
    first.send(range(8))
    first.tier.close()
    assert second.load(range(8)) == list(range(8))


@needs_server
def test_an_end_does_not_wait_for_a_server_that_hangs(engine, server, monkeypatch):
    monkeypatch.setattr(shared_l2, "CLOSE_S", 0.2)
    first = engine()
    first.store([0])
    server.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    first.send(range(1, 8))
    first.tier.submit_load_task([make_key(0)], first.allocate())
    first.tier.close()
    assert time.monotonic() - begin < 3
    server.process.send_signal(signal.SIGCONT)


@needs_server
def test_a_wrong_password_is_said_and_not_shown(engine, monkeypatch, caplog):
    monkeypatch.setenv(PASSWORD_VARIABLE, "wr0ng")
    monkeypatch.setattr(tiers.LOGGERS["shared"], "propagate", True)
    assert engine().look_up([1]) == []
    assert "shared tier: left alone for 10 s: invalid username-password" in caplog.text
    assert "wr0ng" not in caplog.text


def test_a_server_that_is_not_there_yet_is_no_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tier = SharedL2Adapter({"shared.url": f"redis://127.0.0.1:{port}"})
    task = tier.submit_lookup_and_lock_task([make_key(0)], {0: LAYOUT})
    until(lambda: (hits := tier.query_lookup_and_lock_result(task)) and not hits.test(0))
    assert tier.report_status()["left_alone"]
    tier.close()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"shared.url": None},
        {"shared.url": "http://cache:6379"},
        {"shared.url": "redis://:s3cret@cache:6379"},
        {"shared.url": "redis://cache:6379", "password": "s3cret"},
    ],
)
def test_wrong_settings_stop_the_server_and_are_not_shown(params):
    with pytest.raises(SettingsError, match=r"shared\.url alone") as error:
        SharedL2Adapter(params)
    assert "s3cret" not in str(error.value)


def test_the_password_is_the_setting_of_that_name():
    settings = Settings.load(
        {"model": "m", "remote_url": "redis://cache:6379", "remote_password": PASSWORD}
    )
    assert engine_variables(settings)[PASSWORD_VARIABLE] == PASSWORD
    assert PASSWORD not in " ".join(vllm_arguments(settings))


class Listener(L2AdapterListener):
    """What a tier has, by what it tells."""

    def __init__(self):
        self.changes = []

    def on_l2_keys_stored(self, keys, sizes):
        self.changes += [(key, True) for key in keys]

    def on_l2_keys_accessed(self, keys):
        assert keys

    def on_l2_keys_deleted(self, keys):
        self.changes += [(key, False) for key in keys]

    def take(self):
        changes, self.changes = self.changes, []
        return changes


@needs_server
def test_a_listener_hears_what_is_put_and_found_and_what_is_asked_for_in_vain(engine, server):
    listeners = Listener(), Listener()
    first, second = engine(), engine()
    for each, listener in zip((first, second), listeners, strict=True):
        each.tier.register_listener(listener)
    a, b, c = map(make_key, range(3))
    first.store([0, 1])
    assert listeners[0].take() == [(a, True), (b, True)]
    second.look_up([0, 1, 2])
    assert listeners[1].take() == [(a, True), (b, True), (c, False)]
    server.client.flushall()
    assert second.load([0]) == []
    assert listeners[1].take() == [(a, False)]
    assert listeners[0].take() == []  # the server tells nobody
    server.stop()
    second.look_up([1])
    second.store([1])
    assert listeners[1].take() == []
