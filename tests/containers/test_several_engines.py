"""Two engines: a shared tier between them, and the router before them."""

from __future__ import annotations

import time

import httpx
import pytest
from stack import ask, conversation

from lmcache_xpu.harness.random_model import EXACT

PASSWORD = r's3"cr\et'


@pytest.fixture(scope="module")
def stack(make_stack):
    stack = make_stack(
        LMCACHE_XPU_REMOTE_URL="redis://cache:6379",
        LMCACHE_XPU_REMOTE_PASSWORD=PASSWORD,
        ROUTER_POLICY="cache_aware",
        SHARED_CACHE_MB="512",
        LMCACHE_XPU_API_KEY="key-of-these-tests",
        LMCACHE_XPU_ENFORCE_EAGER="true",
        LMCACHE_XPU_DISK_GIB="",
        COMPOSE_PROFILES="xpu,xpu-2,shared-cache,router",
    )
    stack.up("cpu")
    return stack


def shared_bytes(stack, url, direction):
    name = f'lmcache_xpu_bytes_total{{direction="{direction}",tier="shared"'
    return sum(stack.samples(name, url).values())


def test_what_one_engine_computed_the_other_one_finds(stack):
    first, second = stack.address("engine-cpu"), stack.address("engine-cpu-2")
    with stack.client(first) as near, stack.client(second) as far:
        expected = ask(near, conversation(1))
        end = time.monotonic() + 20
        stored = expected.prompt_tokens // 256 * 256 * EXACT.kv_bytes_per_token
        while shared_bytes(stack, first, "store") < stored:
            assert time.monotonic() < end, "nothing reached the shared tier"
            time.sleep(0.2)
        before = far.counts()
        answer = ask(far, conversation(1))
        hits = (far.counts() - before).external_hits
    assert hits >= 1024
    assert answer.token_ids == expected.token_ids
    assert shared_bytes(stack, second, "load") >= hits * EXACT.kv_bytes_per_token


def test_without_a_size_the_engines_have_no_disk_tier(stack):
    """After something was stored; a tier would have its lock in the directory at the least."""
    for engine in ("engine-cpu", "engine-cpu-2"):
        assert stack.compose("exec", engine, "ls", "/var/cache/kv").stdout == ""
        url = stack.address(engine)
        stored = stack.samples('lmcache_xpu_bytes_total{direction="store",tier="disk"', url)
        assert not any(stored.values())


def test_the_server_wants_its_password_and_shows_it_to_nobody(stack):
    done = stack.compose("exec", "-e", "PASSWORD=", "valkey", "valkey-cli", "ping", check=False)
    assert "NOAUTH" in done.stdout
    for service in ("valkey", "engine-cpu"):
        assert PASSWORD not in stack.compose("top", service).stdout
        assert PASSWORD not in stack.logs(service)


def test_a_conversation_stays_with_its_engine(stack):
    router = stack.url("ROUTER_PORT")
    urls = [stack.address("engine-cpu"), stack.address("engine-cpu-2")]

    def asked():
        return [sum(stack.samples("vllm:prefix_cache_queries_total", url).values()) for url in urls]

    with stack.client(router) as client:
        messages = conversation(50)
        first = ask(client, messages)
        before = asked()
        for question in ("And then?", "Why?"):
            messages += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": question},
            ]
            first = ask(client, messages)
    grown = [b > a for a, b in zip(before, asked(), strict=True)]
    assert sorted(grown) == [False, True]


@pytest.mark.parametrize("path", ["/add_worker?url=http://evil:1", "/remove_worker", "/workers"])
def test_nobody_takes_over_the_router(stack, path):
    """From the published port, and from another container of the stack."""
    key = {"Authorization": f"Bearer {stack.settings['LMCACHE_XPU_API_KEY']}"}
    for headers in ({}, key):
        answer = httpx.post(stack.url("ROUTER_PORT") + path, headers=headers, trust_env=False)
        assert answer.status_code == 404
    url = stack.url("ROUTER_PORT") + "/v1/models"
    assert httpx.get(url, trust_env=False).status_code == 401
    assert httpx.get(url, headers=key, trust_env=False).status_code == 200
    for port in (8001, 30000):  # the router's own, and the gate's
        code = f"import urllib.request as u; u.urlopen('http://router:{port}{path}', b'', 5)"
        done = stack.compose("exec", "engine-cpu", "python3", "-c", code, check=False)
        expected = "Connection refused" if port == 8001 else "HTTP Error 404"
        assert expected in done.stdout


def test_every_request_through_the_router_arrives_once(stack):
    router = stack.url("ROUTER_PORT")
    urls = [stack.address("engine-cpu"), stack.address("engine-cpu-2")]
    before = [sum(stack.samples("vllm:request_success_total", url).values()) for url in urls]
    with stack.client(router) as client:
        for seed in range(60, 68):
            ask(client, conversation(seed), tokens=2)
    after = [sum(stack.samples("vllm:request_success_total", url).values()) for url in urls]
    assert sum(after) - sum(before) == 8


def test_without_the_server_the_engines_go_on(stack):
    stack.compose("stop", "valkey")
    with stack.client(stack.address("engine-cpu")) as client:
        assert ask(client, conversation(80)).completion_tokens == 24
