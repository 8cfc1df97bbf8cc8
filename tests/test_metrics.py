"""What is counted, and that one process's counts reach another's /metrics."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess

from lmcache_xpu import metrics
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.serve import environment
from lmcache_xpu.launch.settings import Settings


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"lmcache_xpu_{name}", labels) or 0.0


def test_a_move_counts_in_its_own_flow_alone():
    flows = {(d, t): value("bytes_total", direction=d, tier=t) for d, t in FLOWS}
    metrics.LOAD_DISK.moved(size_bytes=4096, tokens=256, seconds=0.5)
    changed = {
        (d, t): value("bytes_total", direction=d, tier=t) - flows[d, t]
        for d, t in FLOWS
        if value("bytes_total", direction=d, tier=t) != flows[d, t]
    }
    assert changed == {("load", "disk"): 4096}


FLOWS = [(d, t) for d in ("store", "load") for t in ("cpu", "disk")]


@pytest.mark.parametrize(("direction", "tier"), FLOWS)
@pytest.mark.parametrize("name", ["bytes_total", "tokens_total", "seconds_total"])
def test_every_flow_is_there_before_anything_moved(name, direction, tier):
    labels = {"direction": direction, "tier": tier}
    assert REGISTRY.get_sample_value(f"lmcache_xpu_{name}", labels) is not None


def test_failures_and_fallbacks_are_counted_by_reason():
    labels = {"direction": "load", "tier": "disk", "reason": "corrupt"}
    before = value("errors_total", **labels), value("fallbacks_total", reason="lost")
    metrics.LOAD_DISK.failed("corrupt")
    metrics.fallback("lost")
    after = value("errors_total", **labels), value("fallbacks_total", reason="lost")
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1]


COUNTING = """
from lmcache_xpu import metrics
metrics.STORE_CPU.moved(size_bytes=1000, tokens=10, seconds=1)
metrics.DISK_USED_BYTES.set(5)
"""


def test_processes_share_a_directory_and_an_earlier_engine_does_not_count(tmp_path):
    settings = Settings.load({"model": "org/model"})
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"), "PATH": ""}
    for _ in range(2):  # engines, one after the other
        env = environment(settings, variables)
        for _ in range(2):  # processes of one engine
            subprocess.run([sys.executable, "-c", COUNTING], env=env, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=env["PROMETHEUS_MULTIPROC_DIR"])
    page = generate_latest(registry).decode()
    assert 'lmcache_xpu_bytes_total{direction="store",tier="cpu"} 2000.0' in page
    assert "lmcache_xpu_disk_used_bytes 10.0" in page


def test_the_directory_is_the_users_alone_and_of_this_port(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = {
        environment(Settings.load({"model": "m", "port": port}), {})["PROMETHEUS_MULTIPROC_DIR"]
        for port in (8000, 8001)
    }
    assert len(paths) == 2
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "file")}
    with pytest.raises(SettingsError, match=r"file for the engine's metrics .*MULTIPROC_DIR"):
        environment(Settings.load({"model": "m"}), variables)
