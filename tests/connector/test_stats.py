"""What workers count reaches vLLM's log and /metrics: once, and of all of them."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from lmcache_xpu import metrics
from lmcache_xpu.connector import stats
from lmcache_xpu.connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.connector.stats import ConnectorStats, PromMetrics, StatsHooks

HERE = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    stats.take()


def sent(stats: ConnectorStats | None) -> dict[str, Any]:
    """Stats as they reach another process."""
    assert stats is not None
    data: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    return data


def worker(process: str, seconds: float = 0.5) -> dict[str, Any]:
    counts = {"bytes load cpu": 2.0**20, "tokens load cpu": 256.0, "seconds load cpu": seconds}
    levels = {"disk_used_bytes": 2.0**30, "disk_limit_bytes": 2.0**31}
    return {process: {"counts": counts, "levels": levels}}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"lmcache_xpu_{name}", labels) or 0.0


def of_role(role: KVConnectorRole) -> StatsHooks:
    made = StatsHooks()
    made.role = role
    return made


def test_a_step_tells_what_was_counted_since_the_last_one():
    made = of_role(KVConnectorRole.WORKER)
    assert made.get_kv_connector_stats() is None
    metrics.LOAD_CPU.moved(0.25, size_bytes=4096, tokens=256)
    metrics.LOAD_CPU.moved(0.25, size_bytes=4096, tokens=256)
    metrics.LOAD_DISK.failed("corrupt")
    metrics.fallback("load")
    assert sent(made.get_kv_connector_stats())[HERE]["counts"] == {
        "bytes load cpu": 8192,
        "tokens load cpu": 512,
        "seconds load cpu": 0.5,
        "errors load disk corrupt": 1,
        "fallbacks load": 1,
    }
    assert made.get_kv_connector_stats() is None


def test_the_schedulers_half_takes_nothing_from_the_workers():
    """In one process both would ask, and each number must be told once."""
    made = of_role(KVConnectorRole.SCHEDULER)
    metrics.fallback("load")
    assert made.get_kv_connector_stats() is None
    assert stats.take() is not None


def test_a_level_is_told_when_it_changes():
    metrics.DISK_USED_BYTES.set(5)
    assert sent(stats.take())[HERE]["levels"]["disk_used_bytes"] == 5
    metrics.fallback("load")
    assert sent(stats.take())[HERE]["levels"] == {}


def test_vllms_log_line_has_the_sums_of_all_workers_and_steps(monkeypatch):
    made = object.__new__(KVConnectorLogging)
    made.connector_cls = LMCacheXPUServerConnector
    made.reset()
    one_step = ConnectorStats(worker("a")).aggregate(ConnectorStats(worker("b")))
    made.observe(sent(one_step))
    failed = {"a": {"counts": {"errors load disk io": 2.0, "fallbacks load": 1.0}, "levels": {}}}
    made.observe(failed)
    made.observe(worker("a"))
    lines: list[str] = []
    made.log(lambda line, *args: lines.append(line % args))
    assert lines == [
        "KV Transfer metrics: load_cpu_mib=3.0, load_disk_io_errors=2, load_fallbacks=1, "
        "load_cpu_s=1.5, load_cpu_tokens=768, disk_limit_gib=4.0, disk_used_gib=2.0"
    ]
    made.log(lambda line, *args: lines.append(line % args))
    assert len(lines) == 1, "an interval without any is not logged"


def prom(**types: Any) -> PromMetrics:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds = dict.fromkeys([Counter, *_others()], None) | {Counter: types.get("counter", Counter)}
    return LMCacheXPUServerConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})


def _others() -> list[Any]:
    from prometheus_client import Gauge, Histogram

    return [Gauge, Histogram]


LOADED = {"direction": "load", "tier": "cpu"}


def test_an_api_server_shows_what_engines_in_other_processes_counted(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    made = prom()
    before = value("bytes_total", **LOADED)
    made.observe({**worker("a"), **worker("b")}, engine_idx=0)
    made.observe(worker("a"), engine_idx=1)
    assert value("bytes_total", **LOADED) - before == 3 * 2**20
    assert value("disk_used_bytes") == 3 * 2**30
    errors = {"direction": "store", "tier": "disk", "reason": "full"}
    before = value("errors_total", **errors)
    made.observe({"a": {"counts": {"errors store disk full": 1.0}, "levels": {}}})
    assert value("errors_total", **errors) - before == 1


def test_what_this_process_counted_is_not_counted_again(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    before = value("bytes_total", **LOADED)
    metrics.LOAD_CPU.moved(0.1, size_bytes=4096, tokens=256)
    prom().observe(sent(stats.take()))
    assert value("bytes_total", **LOADED) - before == 4096


def test_processes_that_share_a_directory_have_it_there_already(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/anywhere")
    before = value("bytes_total", **LOADED)
    prom().observe(worker("a"))
    assert value("bytes_total", **LOADED) == before


def test_other_kinds_of_metrics_are_left_alone(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    before = value("bytes_total", **LOADED)
    prom(counter=object).observe(worker("a"))
    assert value("bytes_total", **LOADED) == before


def test_stats_begin_empty():
    made = LMCacheXPUServerConnector.build_kv_connector_stats()
    assert made.is_empty()
    assert not made.aggregate(ConnectorStats(worker("a"))).is_empty()
    made.reset()
    assert made.is_empty()
    assert LMCacheXPUServerConnector.build_kv_connector_stats().is_empty()
