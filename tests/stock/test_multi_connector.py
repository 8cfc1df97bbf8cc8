"""The connector's class inside vLLM's MultiConnector, before and behind others.

NixlConnector and OffloadingConnector can't run on CPU (one lacks its library here, the other has no
CPU worker), so of these the classes answer.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lmcache_xpu.stock.half import StockHalf
from lmcache_xpu.vllm_hooks import plugin


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("other", ["NixlConnector", "OffloadingConnector", "ExampleConnector"])
def test_the_classes_answer_together(other: str, first: bool):
    plugin.register()  # vLLM does, from the entry point
    ours: dict[str, Any] = {
        "kv_connector": "LMCacheXPUConnector",
        "kv_connector_module_path": "lmcache_xpu.vllm_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.use_layerwise": True},
    }
    theirs = {"kv_connector": other, "kv_role": "kv_both"}
    extra = {"connectors": [ours, theirs] if first else [theirs, ours]}
    assert MultiConnector.requires_piecewise_for_cudagraph(extra)  # of ours, layer by layer
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    assert not MultiConnector.all_children_support_hma(transfer)


def test_nobody_waits_for_a_store_of_a_cache():
    """vLLM computes a preempted request again where a hand-off is pending; here none is."""
    multi: Any = object.__new__(MultiConnector)
    multi._connectors = [object.__new__(StockHalf)]
    assert not multi.requires_kv_delivery
