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
import torch
from prometheus_client import Counter, Gauge, Histogram

pytest.importorskip("vllm")
from support.halves import Facade, worker_side
from support.loads import stored
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import KVConnectorOutput

from lmcache_xpu import metrics
from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.kv_connector import plugin
from lmcache_xpu.kv_connector import stats as connector_stats
from lmcache_xpu.kv_connector.kv_events import TierReport
from lmcache_xpu.kv_connector.step_metadata import StepMetadata
from lmcache_xpu.kv_connector.worker_report import WorkerReport
from lmcache_xpu.tiers.residency import CPU, Change, Residency

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
    counter = metrics._BYTES.labels("load", "disk")
    before = counter._value.get()
    counts = {"counts": {"bytes load disk": 4096.0}, "levels": {}}
    sent = {"LMCacheXPUConnector": {"another process": counts}}
    prom.observe(sent)
    assert counter._value.get() - before == 4096
    stats = MultiConnector.build_kv_connector_stats(sent)
    assert stats.reduce()["LMCacheXPUConnector"]["load_disk_mib"] == 0.0


def made_of(other: str, first: bool) -> tuple[Any, Any]:
    """A MultiConnector of two, as far as hooks need it, and ours in it."""
    ours = Facade(worker=worker_side(in_flight=InFlight(block_tokens=4)))
    ours.worker_side.residency = Residency()
    theirs: Any = object.__new__(getattr(importlib.import_module(OTHERS[other]), other))
    theirs.connector_worker = theirs.connector_scheduler = None
    multi: Any = object.__new__(MultiConnector)
    multi._connectors = [ours, theirs] if first else [theirs, ours]
    return multi, ours


@orders
@pytest.mark.parametrize("other", ["NixlConnector", "ExampleConnector"])
def test_blocks_are_protected_before_vllm_prepares_the_step(other: str, first: bool):
    """Without `begin_step`, which a MultiConnector does not have."""
    multi, ours = made_of(other, first)
    move = stored()
    ours.worker_side.in_flight.add_store(
        [], move, torch.tensor([4, 5, 6, 7, 8, 9])
    )  # blocks 1 and 2
    for written, waits in (({0, 3}, 0), ({2, 7}, 1)):
        meta = StepMetadata(new_blocks=frozenset(written), tokens=1)
        metas: list[Any] = [meta, SimpleNamespace()]
        multi.handle_preemptions(MultiKVConnectorMetadata(tuple(metas if first else metas[::-1])))
        assert move.gathered.waited == waits


def test_a_step_whose_new_blocks_are_not_known_protects_all():
    _, ours = made_of("ExampleConnector", True)
    move = stored()
    ours.worker_side.in_flight.add_store([], move, torch.tensor([4]))
    ours.handle_preemptions(StepMetadata())
    assert move.gathered.waited == 1


@orders
@pytest.mark.parametrize("other", OTHERS)
def test_stats_and_reports_of_tiers_pass_through(other: str, first: bool):
    multi, ours = made_of(other, first)
    connector_stats.take()
    metrics.LOAD_CPU.moved(0.1, size_bytes=2**20, tokens=256)
    stats = multi.get_kv_connector_stats()
    assert stats.reduce()["LMCacheXPUConnector"]["load_cpu_tokens"] == 256
    ours.worker_side.residency.changed(CPU, "a", True)
    meta = multi.build_connector_worker_meta()
    assert WorkerReport(TierReport(2, [Change(CPU, "a", True)], 2)) in meta.metadata
    assert multi.build_connector_worker_meta() is None
    # The scheduler's half.
    for part in multi._connectors:
        part.connector_scheduler = Mock()  # theirs has one
    heard: list[Any] = []
    ours.scheduler_side = SimpleNamespace(
        end_step=lambda report, arrived: heard.append(report), take_events=lambda: ["event"]
    )
    multi.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
    assert heard == [WorkerReport(TierReport(2, [Change(CPU, "a", True)], 2))]
    assert list(ours.take_events()) == ["event"]


def test_nobody_waits_for_a_store_of_a_cache():
    """vLLM computes a preempted request again where a hand-off is pending; here none is."""
    multi, ours = made_of("ExampleConnector", True)
    assert ours._kv_transfer_config.is_kv_producer
    assert not ours.requires_kv_delivery
    multi._connectors = [ours]
    assert not multi.requires_kv_delivery
