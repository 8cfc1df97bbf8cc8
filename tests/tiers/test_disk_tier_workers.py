"""The disk tier's directory, shared by workers, and its settings."""

from __future__ import annotations

import os

import pytest
from storage import (
    make_config,
    make_metadata,
)

from lmcache_xpu.disk import chunk_store
from lmcache_xpu.disk.settings import DiskSettings, check_hash
from lmcache_xpu.disk.tier import DiskTier
from lmcache_xpu.errors import SettingsError


def test_workers_share_the_path(engines, tmp_path):
    zero = engines(metadata=make_metadata(0, 2))
    one = engines(metadata=make_metadata(1, 2))
    zero.store([0])
    one.store([1])
    assert zero.load([0]) == [0]
    assert zero.load([1]) == []
    assert one.load([1]) == [1]
    assert (tmp_path / "kv" / "kv-worker-0").stat().st_mode & 0o777 == 0o700


def test_fewer_workers_than_before_leave_nothing_behind(engines, tmp_path):
    one = engines(metadata=make_metadata(1, 2))
    one.store([0])
    one.close()
    engines()
    assert list((tmp_path / "kv" / "kv-worker-1").glob("*.lmxkv")) == []


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
        ("disk.gb", 5),
    ],
)
def test_wrong_settings_are_named(name, value):
    extra = {"disk.path": "/cache", "disk.gib": 1, name: value, "other": "is not ours"}
    with pytest.raises(SettingsError, match=name):
        DiskSettings.parse(extra)


def test_settings():
    found = DiskSettings.parse({"disk.path": "/cache", "disk.gib": 0.5})
    assert (str(found.path), found.limit_bytes, found.threads) == ("/cache", 2**29, 4)


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
