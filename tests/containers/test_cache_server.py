"""LMCache's server as a service: two engines with one memory, its disk, its end and its return."""

from __future__ import annotations

import json
import time

import pytest
from docker_host import ROOT
from stack import ask, conversation, crowd_out


@pytest.fixture(scope="module")
def stack(make_stack):
    stack = make_stack(
        LMCACHE_XPU_CACHE="server",
        LMCACHE_XPU_SERVER_URL="ipc:///dev/shm/lmcache-xpu/server.sock",
        LMCACHE_XPU_DISK_GIB="",
        LMCACHE_XPU_ENFORCE_EAGER="true",
        SERVER_GIB="0.5",
        SERVER_SHM_SIZE="2g",
        SERVER_DISK_GIB="1",
        COMPOSE_PROFILES="xpu,xpu-2,xpu-server,monitoring",
    )
    stack.up("cpu")
    return stack


def hits_of(client, seed):
    """External hits of a prompt, and its answer."""
    before = client.counts()
    answer = ask(client, conversation(seed))
    return (client.counts() - before).external_hits, answer


def wait_for_a_hit(client, seed):
    """The answer of a prompt that the engine's own cache has lost, once the server has it."""
    end = time.monotonic() + 60
    while True:
        crowd_out(client, seed * 100)
        hits, answer = hits_of(client, seed)
        if hits >= 1024:
            return answer
        assert time.monotonic() < end, "nothing came back from the server"


def test_what_one_engine_computed_the_other_one_hits(stack):
    with (
        stack.client(stack.address("engine-cpu")) as near,
        stack.client(stack.address("engine-cpu-2")) as far,
    ):
        expected = ask(near, conversation(1))
        answer = wait_for_a_hit(far, 1)
    assert answer.token_ids == expected.token_ids


def test_no_container_has_the_hosts_memory_or_rights(stack):
    for service in ("engine-cpu", "engine-cpu-2", "server-cpu"):
        config = stack.inspect(service)["HostConfig"]
        assert (config["IpcMode"], config["Privileged"]) == ("private", False)


def test_hits_come_back_when_the_server_does(stack):
    stack.host.run("kill", "--signal", "KILL", stack.inspect("server-cpu")["Id"])
    with stack.client(stack.address("engine-cpu")) as client:
        assert ask(client, conversation(2)).completion_tokens == 24
        stack.compose("start", "server-cpu")
        stack.wait_healthy("server-cpu")
        expected = ask(client, conversation(3))
        assert wait_for_a_hit(client, 3).token_ids == expected.token_ids
    assert "Insufficient /dev/shm" not in stack.logs("server-cpu")


def test_its_disk_tier_outlives_it(stack):
    listed = stack.compose("exec", "server-cpu", "ls", "/var/cache/kv/kv-server").stdout
    assert ".lmxkv" in listed


def test_prometheus_sees_it(stack):
    end = time.monotonic() + 60
    while not stack.query('max_over_time(up{job="lmcache-server"}[5m]) == 1'):
        assert time.monotonic() < end
        time.sleep(1)
    board = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())
    exprs = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    queries = [
        expr.replace("$__rate_interval", "1m").replace("$namespace", ".*")
        for expr in exprs
        if "lmcache_mp_" in expr or "lmcache-server" in expr
    ]
    assert len(queries) >= 5
    # What has not happened has no series: an eviction, a store without room.
    rare = ("evicted", "allocation_failure")
    usual = [query for query in queries if not any(word in query for word in rare)]
    # A server that was started again has no value now until it is scraped again.
    while empty := [query for query in usual if not stack.query(query)]:
        assert time.monotonic() < end, empty
        time.sleep(1)
