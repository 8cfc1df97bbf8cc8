"""LMCache makes the GPU connectors of this package, of the engine's real content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from support.scripts import run_script

from lmcache_xpu.errors import SeamError
from lmcache_xpu.stock.gpu_connectors import SEAM, making
from lmcache_xpu.versions.lmcache import in_process_module

CREATE = """
import json
import torch
from lmcache_xpu.model.kv_cache_facts import EngineFacts
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_xpu.stock.gpu_connectors import gpu_connector
facts = EngineFacts(device_type="cpu", kv_layout="BHLNC", opaque_blocks=False, heads=2,
                    head_size=12, block_size=16, namespace="+c24")
mine = LMCacheMetadata("model", 1, 1, 0, 0, torch.uint8, (3, 2, 256, 2, 8))
ours = gpu_connector(LMCacheEngineConfig.from_defaults(), mine, facts)
print(json.dumps({
    "shape": list(ours.get_shape(5)), "metadata": [list(s) for s in mine.get_shapes(5)],
    "model": mine.model_name, "hint": ours.geometry.kv_layout,
}))
"""


def test_keys_and_memory_are_of_the_engines_real_content():
    printed_values = run_script(CREATE)
    # 12 elements a plane here, not what the model's heads suggest (8).
    assert printed_values["shape"] == [2, 3, 5, 24]
    assert printed_values["metadata"] == [[2, 3, 5, 24]]
    assert printed_values["model"] == "model+c24.layers"
    assert printed_values["hint"] == "BHLNC"  # LMCache's own hints would have refused this layout


def test_lmcache_s_own_way_is_back_when_the_engine_has_started():
    module = in_process_module("v1.gpu_connector")
    original = getattr(module, SEAM)
    made_none = pytest.raises(SeamError, match="made 0 GPU connectors")
    facts = SimpleNamespace(device_type="cpu")
    with made_none, making(facts):
        assert getattr(module, SEAM) is not original
    assert getattr(module, SEAM) is original
    with pytest.raises(RuntimeError, match="planted"), making(facts):
        raise RuntimeError("planted")
    assert getattr(module, SEAM) is original
