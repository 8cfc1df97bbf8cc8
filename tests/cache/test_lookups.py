"""A scheduler's look-ups, at a server of the same LMCache and of another one."""

from __future__ import annotations

import itertools
import time

import pytest
from prometheus_client import REGISTRY
from support.other_server import OtherServer
from support.until import until

pytest.importorskip("vllm")

from support.server_clients import BEAT_S, WAIT_S, client_at

from lmcache_xpu.cache import lookups as module
from lmcache_xpu.cache.lookups import LookUps
from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.versions.lmcache_server import key_tokens

LOOKED_UP = 512  # whole chunks
TOKENS = key_tokens(range(600))


@pytest.fixture
def server():
    with OtherServer("tcp://127.0.0.1:*") as server:
        yield server


@pytest.fixture
def client(server):
    with client_at(server.url, 128) as client:
        client.start_heartbeat(BEAT_S)
        yield client


@pytest.fixture
def lookups(client):
    return LookUps(client)


numbers = itertools.count()


def hit(lookups, name, *, is_alone=False):
    return lookups.find(TokenRange(name, TOKENS, 0, LOOKED_UP), is_alone=is_alone)


def look_up(lookups):
    """Return what a look-up says, as vLLM's scheduler asks for it."""
    name = f"request {next(numbers)}"
    while (result := hit(lookups, name)) is None:
        lookups.end_step()
        time.sleep(0.01)
    lookups.forget(name)
    return result


def failures():
    labels = {"direction": "load", "tier": "server", "reason": "server"}
    return REGISTRY.get_sample_value("lmcache_xpu_errors_total", labels) or 0.0


def test_a_hit_is_counted_in_tokens(server, lookups):
    server.reads_keys = True
    server._answers["query_prefetch_status"] = 2  # chunks
    assert look_up(lookups) == 512


def test_requests_that_arrive_together_are_looked_up_together(server, lookups):
    server.reads_keys = True
    for name in "abc":
        lookups.begin(TokenRange(name, TOKENS, 0, LOOKED_UP))
        lookups.begin(TokenRange(name, TOKENS, 0, LOOKED_UP))  # once
    # Who is scheduled first sees to the questions of those behind it, too.
    until(lambda: (hit(lookups, "a"), server.asked.count("query_prefetch_status") == 3)[1])
    assert server.lookups == [LOOKED_UP] * 3
    assert [hit(lookups, name) for name in "bc"] == [0, 0]


def test_a_long_queue_locks_little(server, lookups):
    server.reads_keys = True
    for number in range(2 * module.MOST_UNSCHEDULED):
        lookups.begin(TokenRange(str(number), TOKENS, 0, LOOKED_UP))
    until(lambda: hit(lookups, "0") == 0)
    assert len(server.lookups) == module.MOST_UNSCHEDULED
    lookups.forget("0")
    lookups.begin(TokenRange("next", TOKENS, 0, LOOKED_UP))
    until(lambda: len(server.lookups) == module.MOST_UNSCHEDULED + 1)


def test_a_prompt_without_a_whole_chunk_is_not_asked_for(server, lookups):
    assert lookups.find(TokenRange("short", TOKENS, 0, 0), is_alone=True) == 0
    lookups.end("short")
    server.wait_for_heartbeats(1)
    assert server.lookups == []


def test_a_server_that_answers_the_heartbeat_alone_lets_no_second_request_wait(
    server, client, lookups
):
    before = failures()
    for _ in range(4):
        assert look_up(lookups) == 0
        server.wait_for_heartbeats(2)
    assert server.lookups.count(LOOKED_UP) == 1
    assert server.lookups.count(0) >= 3  # each heartbeat's
    assert not client.healthy.is_set()
    assert failures() == before + 1


def test_it_is_asked_again_when_it_answers(server, client, lookups):
    look_up(lookups)
    server.reads_keys = True
    until(client.healthy.is_set)
    before = failures()
    look_up(lookups)
    assert server.lookups.count(LOOKED_UP) == 2
    assert failures() == before


def test_an_answer_that_was_on_its_way_when_a_look_up_was_lost_says_nothing(
    server, client, lookups
):
    server.reads_keys = True
    look_up(lookups)
    server.reads_keys, server.slow_s = False, WAIT_S + 0.1
    server.wait_for_heartbeats(1)  # which is answered after the look-up was given up
    assert look_up(lookups) == 0
    for _ in range(10):
        time.sleep(server.slow_s / 10)
        assert not client.healthy.is_set()


def test_a_request_is_waited_for_in_its_first_two_steps(server, lookups, monkeypatch):
    """vLLM asks again with its next step only. Disks take longer; and many may ask at once."""
    slept = []
    sleep = time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (slept.append(1), sleep(seconds)))

    def waits(name):
        slept.clear()
        assert hit(lookups, name) is None
        return bool(slept)

    server.reads_keys = server.fetches = True
    assert waits("fetched")
    assert not waits("beside it")  # the step has waited long enough
    lookups.end_step()
    assert waits("fetched")
    lookups.end_step()
    assert not waits("fetched")
    assert waits("beside it")
    server.fetches = False
    until(lambda: hit(lookups, "fetched") == 0)
    for patience in ("PATIENCE_S", "PATIENCE_ALONE_S"):
        monkeypatch.setattr(module, patience, 20.0)
    lookups.end_step()
    assert hit(lookups, "in memory") == 0


def test_a_request_that_is_alone_is_waited_for_longer(server, lookups, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    for patience in ("PATIENCE_ALONE_S", "PATIENCE_ALL_ALONE_S"):
        monkeypatch.setattr(module, patience, 20.0)
    server.reads_keys = server.fetches = True
    assert hit(lookups, "a") is None
    lookups.end_step()
    server.fetches = False
    assert hit(lookups, "a", is_alone=True) == 0


def test_each_of_several_that_are_alone_is_waited_for(server, lookups, monkeypatch):
    """One that is fetched from a disk leaves time for those behind it, in memory."""
    monkeypatch.setattr(module, "PATIENCE_ALONE_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_ALL_ALONE_S", 20.0)
    server.reads_keys = server.fetches = True
    begin = time.monotonic()
    assert hit(lookups, "fetched", is_alone=True) is None
    assert time.monotonic() - begin < 10
    server.fetches = False
    monkeypatch.setattr(module, "PATIENCE_ALONE_S", 20.0)
    assert hit(lookups, "in memory") == 0


def test_a_loss_that_the_heartbeat_notices_is_counted_once(server, client, lookups):
    server.reads_keys = True
    look_up(lookups)
    before = failures()
    server.silent = True
    until(lambda: not client.healthy.is_set())
    assert [look_up(lookups) for _ in range(3)] == [0, 0, 0]
    assert failures() == before + 1


def test_a_request_that_ends_while_it_is_looked_up_ends_its_session_behind_the_answer(
    server, lookups, monkeypatch
):
    """Else the server would make the session anew, and keep it; and nobody waits for it here."""
    for patience in ("PATIENCE_S", "PATIENCE_ALONE_S"):
        monkeypatch.setattr(module, patience, 0.0)
    hit(lookups, "a")  # which the server never answers
    begin = time.monotonic()
    lookups.end("a")
    assert time.monotonic() - begin < WAIT_S / 2
    lookups.end_step()
    server.wait_for_heartbeats(1)
    assert "end_session" not in server.asked
    server.reads_keys = True
    hit(lookups, "b")
    lookups.end("b")
    until(lambda: (lookups.end_step(), "end_session" in server.asked)[1])


def test_locks_of_nothing_are_not_given_back(server, lookups):
    lookups.release(TokenRange("a", TOKENS, 0, 0), 0)
    lookups.release(TokenRange("a", TOKENS, 0, 256), 256)
    until(lambda: "free_lookup_locks" in server.asked)
    assert server.asked.count("free_lookup_locks") == 1


def test_a_cache_that_is_emptied_is_waited_for(server, lookups):
    assert not lookups.reset()  # no answer
    server._answers["clear"] = None
    assert lookups.reset()
