"""Who may see what: the network, the key, other clients' entries, files."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path

import httpx
import pytest
from engine import CHUNK, Engine
from hits import hit
from prompts import tokens

from lmcache_xpu.harness.engine_process import _running

pytestmark = pytest.mark.promise("8 security")


def listening(group: int) -> set[str]:
    """Addresses that the processes of a group listen on for TCP."""
    inodes = set()
    for pid in _running(group):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(file.readlink())
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").rstrip("]"))
    sockets = set()
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: LISTEN
                address, port = fields[1].split(":")
                raw = bytes.fromhex(address)
                # Words of four bytes in the machine's order.
                raw = b"".join(raw[i : i + 4][::-1] for i in range(0, size, 4))
                sockets.add(f"{ipaddress.ip_address(raw)} {int(port, 16)}")
    return sockets


@pytest.mark.fails_without("loopback")
def test_nothing_listens_beyond_loopback(engine: Engine):
    """Nor does LMCache's internal API, which can run any code: it has a port of its own.

    Seen to fail with a server that listens on 0.0.0.0.
    """
    if engine.runner.group is None:
        pytest.skip("needs an engine that runs as a process here; a container has its own network")
    addresses, own = listening(engine.runner.group), httpx.URL(engine.url).port
    assert any(entry.endswith(f" {own}") for entry in addresses)
    for entry in addresses:
        address, port = entry.split()
        assert ipaddress.ip_address(address).is_loopback, entry
        if int(port) != own:
            try:
                answer = httpx.get(
                    f"http://127.0.0.1:{port}/metadata", timeout=0.3, trust_env=False
                )
            except httpx.HTTPError:
                continue  # no HTTP there
            pytest.fail(f"port {port} answers HTTP: {answer.status_code}")


@pytest.mark.fails_without("salt", mode="layerwise")
def test_entries_of_a_salt_are_for_that_salt(engine: Engine):
    """Seen to fail with LMCache's own keys: each of these is a hit, as it hashes tokens alone.

    The standard mode's keys hold the salt twice: vLLM's hashes of blocks have it as well.
    """
    prompt = tokens("salted", 3 * CHUNK + 7)
    assert hit_tokens(engine, prompt, cache_salt="one") == 0
    assert hit_tokens(engine, prompt, cache_salt="one") == 3 * CHUNK
    assert hit_tokens(engine, prompt, cache_salt="two") == 0
    assert hit_tokens(engine, prompt) == 0
    assert hit_tokens(engine, prompt) == 3 * CHUNK
    assert hit_tokens(engine, prompt, cache_salt="three") == 0
    assert hit_tokens(engine, prompt, cache_salt="one") == 3 * CHUNK


def hit_tokens(engine: Engine, prompt: list[int], **options: object) -> int:
    engine.forget()
    before = engine.counts()
    engine.ask(prompt, **options)
    return (engine.counts() - before).external_hits


@pytest.mark.fails_without("modes")
def test_files_are_for_the_service_alone(small: Engine, disk: Path):
    """Seen to fail with files of mode 0644."""
    engine = small
    hit(engine, tokens("files", 2 * CHUNK))
    engine.settle()
    inside = [path for path in disk.rglob("*") if path.is_file() or path.is_dir()]
    assert any(path.is_file() for path in inside)
    for path in inside:
        allowed = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == allowed, path


PARAMETERS = [
    {"disagg_spec": {}},
    {"disagg_spec": {"receiver_host": "localhost"}, "ret_first_tok": True},
    {"ret_first_tok": True},
    {"cached_token_stats": True},
    {"do_remote_prefill": True, "remote_block_ids": [-1], "remote_engine_id": "x"},
    {"lmcache.skip_save": "no"},
    {"lmcache.skip_save": {"a": []}},
    {"lmcache.tag.user": {"a": 1}},
    {"lmcache.tag.user": ["a"], "lmcache.tag.": None},
    {"lmcache.tag.user": "%" * 5000},
    {"lmcache.tag.user@@": "@\n\0"},
    {"lmcache.max_offload_tokens": "many"},
    {"": {"": {"": []}}},
]


@pytest.mark.fails_without("parameters", mode="layerwise")
def test_what_a_client_puts_in_a_request_ends_nothing(engine: Engine):
    """It answers the others, and finds what they stored, whatever LMCache reads in a request.

    The standard mode reads none of it.
    """
    prompt = tokens("a client's parameters", 3 * CHUNK + 50)
    expected = engine.recompute(prompt).token_ids
    for number, parameters in enumerate(PARAMETERS):
        own = tokens(("parameters", number), 2 * CHUNK + 50)
        answer = engine.ask(own, 4, kv_transfer_params=parameters).token_ids
        engine.forget()
        assert engine.ask(own, 4, kv_transfer_params=parameters).token_ids == answer
        with engine.answering(own, 200, kv_transfer_params=parameters):  # hangs up
            pass
    engine.ask(prompt, 1)
    assert hit(engine, prompt) == (3 * CHUNK, 0)
    engine.forget()
    assert engine.ask(prompt).token_ids == expected


@pytest.mark.fails_without("labels", mode="layerwise")
def test_metrics_show_the_served_name_and_no_directory(engine: Engine, model: Path):
    """They are read without a key."""
    names = {labels.get("model_name") for _, labels, _ in engine.metrics().samples} - {None}
    assert names == {engine.client.model}
    assert str(model) not in engine._http.get("/metrics").text
