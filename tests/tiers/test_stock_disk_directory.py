"""The disk tier's directory, and its settings."""

from __future__ import annotations

import os

import pytest
from support.storage import make_metadata

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk import chunk_store
from lmcache_xpu.tiers.disk.parameters import DiskSettings
from lmcache_xpu.tiers.stock_disk import DiskTier


def test_engines_have_directories_of_their_own(engines, tmp_path):
    alone = engines()
    alone.store([0])
    alone.close()
    first, second = engines(), engines(**{"disk.engine": 1})
    second.store([1])
    assert (first.load([0]), first.load([1])) == ([0], [])
    assert (second.load([0]), second.load([1])) == ([], [1])
    names = {path.name for path in (tmp_path / "kv").iterdir()}
    assert names == {"kv-worker-0", "kv-engine-1-worker-0"}
    assert (tmp_path / "kv" / "kv-worker-0").stat().st_mode & 0o777 == 0o700
    second.close()
    assert engines(**{"disk.engine": 1}).load([1]) == [1]


def test_a_directory_in_use_is_refused_with_the_reason(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(
        chunk_store.ChunkStore.__init__,
        "__kwdefaults__",
        {"lock_seconds": 0.0},
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
