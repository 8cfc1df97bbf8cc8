"""LMCache's adapter and service factory, with the classes of this package."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from support.scripts import run_script

from lmcache_xpu.cache_engine.factory import Adapter


class Lmcache(Adapter):
    """LMCache's connector, as it is between two steps."""

    def __init__(self, engine: Any = None) -> None:
        self.step = None
        self._layerwise_save_storers = {}
        self._manager = SimpleNamespace(lmcache_engine=engine)


def test_a_layerwise_load_comes_to_its_end_before_the_drafter_does():
    """Else LMCache would never let go of what it took for it."""
    adapter, steps = Lmcache(), iter(range(3))
    adapter.layerwise_retrievers = [steps]
    adapter.end_loads()
    assert list(steps) == []
    assert adapter.layerwise_retrievers == []


def test_a_store_that_is_dropped_ends_and_is_taken_back():
    taken_back: list[Any] = []
    adapter = Lmcache(SimpleNamespace(take_back=taken_back.append))
    storer = (layer for layer in range(3))
    adapter._layerwise_save_storers["r"] = storer
    for name in ("r", "not begun"):
        spec = SimpleNamespace(can_save=True)
        adapter.drop_store(SimpleNamespace(req_id=name, save_spec=spec, token_ids=[1, 2]))
        assert not spec.can_save
    assert list(storer) == []
    assert taken_back == [[1, 2]]
    assert adapter._layerwise_save_storers == {}


CREATE = """
import json
import torch
from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_xpu.cache_engine.factory import gpu_connector
facts = EngineFacts(device_type="cpu", kv_layout="BHLNC", opaque_blocks=False, heads=2,
                    head_size=12, block_size=16, namespace="+c24")
mine = LMCacheMetadata("model", 1, 1, 0, 0, torch.uint8, (3, 2, 256, 2, 8))
ours = gpu_connector(LMCacheEngineConfig.from_defaults(), mine, facts)
print(json.dumps({
    "shape": list(ours.get_shape(5)), "metadata": [list(s) for s in mine.get_shapes(5)],
    "model": mine.model_name, "hint": ours._chunk_format.geometry.kv_layout,
}))
"""


def test_keys_and_memory_are_of_the_engines_real_content():
    printed_values = run_script(CREATE)
    # 12 elements a plane here, not what the model's heads suggest (8).
    assert printed_values["shape"] == [2, 3, 5, 24]
    assert printed_values["metadata"] == [[2, 3, 5, 24]]
    assert printed_values["model"] == "model+c24.layers"
    assert printed_values["hint"] == "BHLNC"  # LMCache's own hints would have refused this layout


LATER_ENGINE = """
import json
import torch
from types import SimpleNamespace
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_xpu.versions.lmcache import VllmServiceFactory
from lmcache_xpu.cache_engine.factory import ServiceFactory
from vllm.platforms import interface
interface.set_assigned_physical_gpu_ids([1])  # as vLLM does on CPU in the second engine
model = SimpleNamespace(
    model="model", dtype=torch.float16, served_model_name="model", use_mla=False, hf_config=None,
    hf_text_config=SimpleNamespace(), get_num_layers=lambda parallel: 2,
    get_num_kv_heads=lambda parallel: 2, get_head_size=lambda: 8)
config = SimpleNamespace(
    model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"),
    speculative_config=None,
    kv_transfer_config=SimpleNamespace(engine_id="e", kv_connector_extra_config={}),
    parallel_config=SimpleNamespace(
        rank=0, world_size=1, data_parallel_rank_local=1, nnodes_within_dp=1,
        distributed_executor_backend="mp", data_parallel_backend="mp"))
def asked(factory):
    try:
        metadata = factory.get_or_create_metadata()
        return [metadata.local_worker_id, metadata.local_world_size, metadata.role]
    except IndexError as error:
        return str(error)
options = LMCacheEngineConfig.from_defaults()
print(json.dumps({
    "LMCache": asked(VllmServiceFactory(options, config, "worker")),
    "ours": asked(ServiceFactory(options, config, "worker", None, None))}))
"""


def test_lmcache_starts_in_every_engine_of_data_parallelism():
    printed_values = run_script(LATER_ENGINE)
    assert "out of range for assigned_physical_gpu_ids [1]" in printed_values["LMCache"]
    assert printed_values["ours"] == [0, 1, "worker"]
