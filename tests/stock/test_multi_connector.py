"""Our connector inside vLLM's MultiConnector, before and behind others.

`engine/test_hooks.py` has engines with it. NixlConnector and OffloadingConnector can't run on CPU
(one lacks its library here, the other has no CPU worker), so of these the classes answer.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import Counter, Gauge, Histogram

pytest.importorskip("vllm")
from support.facade import Facade
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import KVConnectorOutput

from lmcache_xpu import metrics
from lmcache_xpu.connector import stats as connector_stats
from lmcache_xpu.stock.scheduler import WeightsChanged
from lmcache_xpu.vllm_hooks import plugin

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
OTHERS = {
    "NixlConnector": f"{V1}.nixl",
    "OffloadingConnector": f"{V1}.offloading_connector",
    "ExampleConnector": f"{V1}.example_connector",
}
orders = pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
others = pytest.mark.parametrize("other", OTHERS)


def several(other: str, first: bool) -> Any:
    ours: dict[str, Any] = {
        "kv_connector": "LMCacheXPUConnector",
        "kv_connector_module_path": "lmcache_xpu.vllm_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.use_layerwise": True},
    }
    theirs = {"kv_connector": other, "kv_role": "kv_both"}
    connectors = [ours, theirs] if first else [theirs, ours]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": connectors},
    )
    return SimpleNamespace(kv_transfer_config=transfer)


@orders
@others
def test_the_classes_answer_together(other: str, first: bool, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    plugin.register()  # vLLM does, from the entry point
    config = several(other, first)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert MultiConnector.requires_piecewise_for_cudagraph(extra)  # of ours, layer by layer
    assert not MultiConnector.all_children_support_hma(config.kv_transfer_config)

    unregister_vllm_metrics()
    types: dict[Any, Any] = {kind: kind for kind in (Counter, Gauge, Histogram)}
    prom = MultiConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    unregister_vllm_metrics()
    counter = metrics._COUNTERS["bytes"].labels("load", "disk")
    before = counter._value.get()
    counts = {"counts": {"bytes load disk": 4096.0}, "levels": {}}
    sent = {"LMCacheXPUConnector": {"another process": counts}}
    prom.observe(sent)
    assert counter._value.get() - before == 4096
    stats = MultiConnector.build_kv_connector_stats(sent)
    assert stats.reduce()["LMCacheXPUConnector"]["load_disk_mib"] == 0.0


def made_of(other: str, first: bool) -> tuple[Any, Any]:
    """A MultiConnector of two, as far as hooks need it, and ours in it."""
    ours = Facade(worker=SimpleNamespace(report=lambda: None))
    theirs: Any = object.__new__(getattr(importlib.import_module(OTHERS[other]), other))
    theirs.connector_worker = theirs.connector_scheduler = None
    multi: Any = object.__new__(MultiConnector)
    multi._connectors = [ours, theirs] if first else [theirs, ours]
    return multi, ours


@orders
@pytest.mark.parametrize("other", OTHERS)
def test_stats_and_changed_weights_pass_through(other: str, first: bool):
    multi, ours = made_of(other, first)
    connector_stats.take()
    metrics.LOAD_CPU.moved(0.1, size_bytes=2**20, tokens=256)
    stats = multi.get_kv_connector_stats()
    assert stats.reduce()["LMCacheXPUConnector"]["load_cpu_tokens"] == 256
    ours.worker = SimpleNamespace(report=WeightsChanged)
    meta = multi.build_connector_worker_meta()
    for part in multi._connectors:
        part.connector_scheduler = Mock()  # theirs has one
    heard: list[Any] = []
    ours.scheduler = SimpleNamespace(stop=heard.append)
    multi.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
    assert heard == ["the engine's weights have changed"]


def test_nobody_waits_for_a_store_of_a_cache():
    """vLLM computes a preempted request again where a hand-off is pending; here none is."""
    multi, ours = made_of("ExampleConnector", True)
    assert ours._kv_transfer_config.is_kv_producer
    assert not ours.requires_kv_delivery
    multi._connectors = [ours]
    assert not multi.requires_kv_delivery
