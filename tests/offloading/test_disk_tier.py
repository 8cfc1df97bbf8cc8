"""The disk tier by vLLM's own interface of secondary tiers, with vLLM's classes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support.offloading import CHUNK_BYTES, ROWS, Host, files, key, ours, served, spec

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk import chunk_store

KEYS = [key(number) for number in range(16)]
GIB = 2**30


def fill(host: Host, seed: int = 0) -> np.ndarray:
    """Write random bytes to all of host memory; return a copy."""
    host.memory[:] = np.random.default_rng(seed).integers(-128, 128, host.memory.shape, np.int8)
    return host.memory.copy()


def stored(host: Host, seed: int = 0) -> np.ndarray:
    """Store `KEYS` for one request; return the bytes."""
    data, context = fill(host, seed), host.request("stores", KEYS)
    assert host.store(KEYS, context).success
    host.finish(context)
    host.memory[:] = 0
    return data


def test_what_was_stored_is_loaded_byte_for_byte(open_host):
    host = open_host()
    data, context = stored(host), host.request("loads", KEYS)
    assert {host.found(each, context) for each in KEYS} == {"HIT"}
    assert host.found(key(99), context) == "MISS"
    rows = random.Random(0).sample(range(ROWS), len(KEYS))
    result = host.load(KEYS, context, rows)
    assert result.success
    assert (host.memory[rows] == data[: len(KEYS)]).all()
    others = [row for row in range(ROWS) if row not in rows]
    assert not host.memory[others].any()


def test_a_restart_finds_what_was_stored(open_host):
    host = open_host()
    data = stored(host)
    host.close()
    again = open_host()
    context = again.request("loads", KEYS)
    assert {again.found(each, context) for each in KEYS} == {"HIT"}
    assert again.load(KEYS, context).success
    assert (again.memory[: len(KEYS)] == data[: len(KEYS)]).all()


def test_groups_are_kept_apart(open_host):
    host = open_host()
    stored(host)
    assert host.found(key(0, group=1), host.request("loads")) == "MISS"


@pytest.mark.parametrize(
    "told",
    [
        {"model": "some/other"},
        {"dtype": "fp8_e4m3"},
        {"layers": ["layer 0"]},
        {"tokens_per_block": 32},
        {"tp_size": 2},
        {"layout": "HND"},
    ],
    ids=str,
)
def test_another_engine_is_served_nothing(open_host, told: dict):
    host = open_host()
    stored(host)
    host.close()
    other = open_host(told=spec(**told))
    assert other.found(KEYS[0], other.request("loads")) == "MISS"
    other.close()
    same = open_host()
    assert same.found(KEYS[0], same.request("loads")) == "HIT"


def test_other_weights_under_one_name_are_served_nothing(open_host, tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.bin"
    weights.write_bytes(b"a" * 4096)
    host = open_host(told=spec(model=str(model)))
    stored(host)
    host.close()
    weights.write_bytes(b"b" * 4096)
    other = open_host(told=spec(model=str(model)))
    assert other.found(KEYS[0], other.request("loads")) == "MISS"


def test_a_namespace_keeps_engines_apart(open_host):
    host = open_host()
    stored(host)
    host.close()
    other = open_host(options={"namespace": "rope x 4"})
    assert other.found(KEYS[0], other.request("loads")) == "MISS"


def test_chunks_of_another_size_are_served_nothing(open_host):
    host = open_host()
    stored(host)
    host.close()
    other = open_host(chunk_bytes=2 * CHUNK_BYTES)
    assert other.found(KEYS[0], other.request("loads")) == "MISS"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_a_damaged_file_is_a_miss_and_others_are_served(open_host, tmp_path: Path, damage: str):
    host = open_host()
    data = stored(host)
    hurt = files(tmp_path, ".lmxkv")[3]
    content = bytearray(hurt.read_bytes())
    if damage == "remove":
        hurt.unlink()
    else:
        content[-100] ^= 4
        end = {"flip": len(content), "cut": 9000, "empty": 0}[damage]
        hurt.write_bytes(content[:end])
    context = host.request("loads", KEYS)
    result = host.load(KEYS, context)
    assert not result.success
    right = served(result, KEYS)
    assert len(right) == len(KEYS) - 1
    for each in right:
        assert (host.memory[KEYS.index(each)] == data[KEYS.index(each)]).all()
    [missed] = set(KEYS) - set(right)
    assert host.found(missed, context) == "MISS"
    assert host.found(missed, host.request("another")) == "MISS"


def test_a_file_that_fails_to_be_read_is_asked_for_once_by_each_request(open_host, tmp_path: Path):
    host = open_host()
    stored(host)
    hurt = files(tmp_path, ".lmxkv")[0]
    hurt.rename(hurt.with_suffix(".away"))
    hurt.symlink_to(hurt.with_suffix(".away"))  # followed by nobody: could be another user's
    context = host.request("loads", KEYS)
    [failed] = set(KEYS) - set(served(host.load(KEYS, context), KEYS))
    assert host.found(failed, context) == "MISS"
    host.finish(context)
    assert host.found(failed, host.request("another")) == "HIT"


def test_an_aborted_request_leaves_nothing_behind(open_host, tmp_path: Path):
    host = open_host()
    stored(host)
    files(tmp_path, ".lmxkv")[0].unlink()
    context = host.request("aborted", KEYS)
    host.submit(host.tier.submit_load, KEYS, context, None, is_promotion=True)
    host.finish(context)
    [result] = host.tier.get_finished_jobs()
    assert not result.success
    assert not host.tier._failed
    assert not host.tier._last


def test_the_bound_holds_and_the_tail_goes_first(open_host, tmp_path: Path):
    room = 8 * (CHUNK_BYTES + 4096)
    host = open_host(room / GIB)
    for number in (1, 2):  # two steps of one prompt, then another prompt
        fill(host)
        context = host.request(f"prompt {number}", KEYS[:6])
        assert host.store(KEYS[:3], context).success
        assert host.store(KEYS[3:6], context).success
        host.finish(context)
    other = [key(number) for number in range(100, 104)]
    context = host.request("other", other)
    assert host.store(other, context).success
    assert sum(file.stat().st_size for file in files(tmp_path, ".lmxkv")) <= room
    left = [host.found(each, context) == "HIT" for each in KEYS[:6]]
    assert left == [True] * 4 + [False] * 2
    assert {host.found(each, context) for each in other} == {"HIT"}


def test_what_host_memory_served_stays_on_disk(open_host):
    """vLLM asks no tier for chunks that host memory has; the end of a request marks them."""
    host = open_host(8 * (CHUNK_BYTES + 4096) / GIB)
    fill(host)
    old, newer = KEYS[:4], KEYS[4:8]
    for name, keys in {"old": old, "newer": newer}.items():
        context = host.request(name, keys)
        host.store(keys, context)
        host.finish(context)
    context = host.request("served by host memory", old)
    host.tier.touch(old, context)  # as vLLM 0.30 does; later ones give positions
    host.finish(context)
    context = host.request("another", KEYS[8:12])
    host.store(KEYS[8:12], context)
    assert {host.found(each, context) for each in old} == {"HIT"}
    assert {host.found(each, context) for each in newer} == {"MISS"}


def test_a_slow_disk_refuses_jobs_and_ends_each(open_host, monkeypatch: pytest.MonkeyPatch):
    import threading

    host, go = open_host(), threading.Event()
    put = host.tier._store.put
    monkeypatch.setattr(host.tier._store, "put", lambda *args: go.wait() and put(*args))
    context, jobs = host.request("stores", KEYS), []
    for at in range(4):
        keys = [key(1000 * at + number) for number in range(12)]
        jobs.append(host.submit(host.tier.submit_store, keys, context, None, is_promotion=False))
    refused = {result.job_id for result in host.tier.get_finished_jobs() if not result.success}
    assert refused == set(jobs[1:])  # a quarter of host memory is 16 chunks
    go.set()
    host.tier.drain_jobs()
    assert [result.job_id for result in host.tier.get_finished_jobs()] == jobs[:1]


def test_a_full_disk_drops_chunks(open_host, monkeypatch: pytest.MonkeyPatch):
    host = open_host()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunk_store, "write_chunk", full)
    context = host.request("stores", KEYS)
    assert not host.store(KEYS, context).success
    assert host.found(KEYS[0], context) == "MISS"


def test_engines_of_one_serve_have_directories_of_their_own(open_host):
    first = open_host()
    stored(first)
    second = open_host(told=spec(engine=1))
    assert second.found(KEYS[0], second.request("loads")) == "MISS"


def test_a_directory_serves_one_process(open_host, tmp_path: Path):
    open_host()
    with pytest.raises(SettingsError, match="in use by process"):
        Host(ours(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": ""}, "a directory"),
        ({"gib": 0}, "a number above 0"),
        ({"threads": 0}, "a whole number"),
        ({"root_dir": "/tmp"}, "root_dir in secondary_tiers"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict, words: str):
    with pytest.raises(SettingsError, match=words):
        Host({**ours(tmp_path), **options})
