"""The disk tier's directory, shared by workers, and its settings."""

from __future__ import annotations

import os

import pytest
from support.storage import (
    make_config,
    make_metadata,
)

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk import chunk_store
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.stock_disk import DiskTier, check_hash


def test_workers_share_the_path(engines, tmp_path):
    zero = engines(metadata=make_metadata(0, 2))
    second = engines(metadata=make_metadata(1, 2))
    zero.store([0])
    second.store([1])
    assert zero.load([0]) == [0]
    assert zero.load([1]) == []
    assert second.load([1]) == [1]
    assert (tmp_path / "kv" / "kv-worker-0").stat().st_mode & 0o777 == 0o700


def test_fewer_workers_than_before_leave_nothing_behind(engines, tmp_path):
    second = engines(metadata=make_metadata(1, 2))
    second.store([0])
    second.close()
    engines()
    assert list((tmp_path / "kv" / "kv-worker-1").glob("*.lmxkv")) == []


def test_engines_of_one_serve_have_directories_of_their_own(engines, tmp_path):
    """Both have a worker 0. The first has what it had before there were others."""
    alone = engines()
    alone.store([0])
    alone.close()
    first, second = engines(), engines(**{"disk.engine": 1})
    second.store([1])
    assert (first.load([0]), first.load([1])) == ([0], [])
    assert (second.load([0]), second.load([1])) == ([], [1])
    names = {path.name for path in (tmp_path / "kv").iterdir()}
    assert names == {"kv-worker-0", "kv-engine-1-worker-0"}
    second.close()
    assert engines(**{"disk.engine": 1}).load([1]) == [1]


def test_no_engine_empties_the_directories_of_another(engines, tmp_path):
    """It may only not have started yet. Of its own it empties what is left of more workers."""
    left = {0: [0, 1, 11], 1: [0, 1, 11], 12: [1]}
    for engine, workers in left.items():
        for worker in workers:
            wide = engines(metadata=make_metadata(worker, 12), **{"disk.engine": engine})
            wide.store([worker])
            wide.close()
    held = {path.parent.name: path for path in (tmp_path / "kv").glob("*/*.lmxkv")}
    assert len(held) == 7
    engines(metadata=make_metadata(0, 1)).close()
    assert {name for name, path in held.items() if not path.exists()} == {
        "kv-worker-1",
        "kv-worker-11",
    }
    engines(metadata=make_metadata(0, 1), **{"disk.engine": 1}).close()
    assert {name for name, path in held.items() if path.exists()} == {
        "kv-worker-0",
        "kv-engine-1-worker-0",
        "kv-engine-12-worker-1",
    }


def test_a_directory_in_use_is_refused_with_the_reason(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(
        chunk_store.ChunkStore.__init__,
        "__kwdefaults__",
        {"pin_seconds": 300.0, "lock_seconds": 0.0},
    )
    engine = engines()
    engine.store([0])
    other = engines()
    assert other.tier is None
    assert engine.load([0]) == [0]
    with pytest.raises(SettingsError, match=f"in use by process {os.getpid()}"):
        DiskTier(other.config, make_metadata(), other.pool)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk.path", None),
        ("disk.path", ""),
        ("disk.path", 5),
        ("disk.gib", None),
        ("disk.gib", 0),
        ("disk.gib", -1.0),
        ("disk.gib", "100"),
        ("disk.gib", True),
        ("disk.gib", float("nan")),
        ("disk.gib", float("inf")),
        ("disk.threads", 0),
        ("disk.threads", 2.0),
        ("disk.threads", True),
        ("disk.engine", -1),
        ("disk.engine", "1"),
        ("disk.engine", True),
        ("disk.gb", 5),
    ],
)
def test_wrong_settings_are_named(name, value):
    extra = {"disk.path": "/cache", "disk.gib": 1, name: value, "other": "is not ours"}
    with pytest.raises(SettingsError, match=name):
        DiskSettings.parse(extra)


def test_settings():
    parsed = DiskSettings.parse({"disk.path": "/cache", "disk.gib": 0.5})
    assert (str(parsed.path), parsed.limit_bytes, parsed.threads) == ("/cache", 2**29, 4)


def test_a_hash_that_changes_with_the_process_is_refused(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_hash("sha256_cbor")
    for algorithm in ("builtin", "xxhash"):
        with pytest.raises(SettingsError, match="PYTHONHASHSEED"):
            check_hash(algorithm)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(SettingsError):
        check_hash("builtin")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_hash("builtin")


def test_without_a_pool_there_is_no_tier(tmp_path):
    with pytest.raises(SettingsError, match="max_local_cpu_size"):
        DiskTier(make_config(tmp_path), make_metadata(), None)
