"""What LMCache is let load and store of a step, and what its errors cost."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from support.scripts import run_script

from lmcache_xpu.errors import SeamError
from lmcache_xpu.stock import worker as module
from lmcache_xpu.stock.half import StockHalf
from lmcache_xpu.stock.worker import POOL, StockWorker

BLOCK = 4
CONTEXT = SimpleNamespace(attn_metadata={})


class Lmcache:
    """LMCache's half of a connector in a worker."""

    def __init__(self, *, layerwise: bool = False) -> None:
        self.heard: list[Any] = []
        self.fails: set[str] = set()
        self.kv_caches: dict[str, Any] = {}
        self.layerwise_retrievers: list[Any] = []
        self.config = SimpleNamespace(storage_plugins=["disk"])
        self.removed: list[Any] = []
        self.unpinned: list[str] = []
        self.lost: set[int] = set()  # blocks
        self.healthy = True
        self.tiers: dict[str, Any] = {POOL: None, "disk": None}
        self.lmcache_engine: Any = SimpleNamespace(
            use_layerwise=layerwise,
            is_healthy=lambda: self.healthy,
            mark_init_failed=lambda reason: setattr(self, "healthy", False),
            gpu_connector=SimpleNamespace(failed_slots=[]),
            lookup_pins={},
            lookup_unpin=self.unpinned.append,
            storage_manager=SimpleNamespace(
                batched_remove=lambda *arguments: self.removed.append(arguments),
                storage_backends=self.tiers,
            ),
        )

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any, **more: Any) -> None:
            self.heard.append(name)
            if name in self.fails:
                raise RuntimeError("planted")

        return called

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self.lost = self.lost, set()
        return lost


def described(name: str = "r", first: int = 10, *, loads: bool = True) -> Any:
    """A request of eight tokens, of which LMCache has four."""
    load = SimpleNamespace(can_load=loads, vllm_cached_tokens=0, lmcache_cached_tokens=4)
    return SimpleNamespace(
        req_id=name,
        slot_mapping=torch.arange(8) + first * BLOCK,
        load_spec=load if loads else None,
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(self: Any, lmcache: Any, _: Any) -> None:
        self.lmcache = self._lmcache_engine = lmcache

    monkeypatch.setattr(StockHalf, "__init__", begin)
    monkeypatch.setattr(module, "making", lambda facts: nullcontext())
    ends = SimpleNamespace(_register_atexit=lambda call: None)
    monkeypatch.setattr(module, "threading", ends)

    def made(**options: Any) -> tuple[StockWorker, Lmcache]:
        lmcache: Any = Lmcache(**options)
        return StockWorker(lmcache, None, SimpleNamespace(block_size=BLOCK)), lmcache

    return made


def begin(worker: StockWorker, *requests: Any) -> None:
    worker.bind_connector_metadata(SimpleNamespace(requests=list(requests)))
    worker.lmcache.heard.clear()


def test_a_step_is_lmcache_s_own(make):
    worker, lmcache = make()
    begin(worker, described())
    worker.start_load_kv(CONTEXT)
    worker.save_kv_layer("one", None, None)
    worker.wait_for_save()
    assert lmcache.heard == ["start_load_kv", "wait_for_save"]
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_finished({"aborted"}) == (None, None)
    assert lmcache.unpinned == ["r", "aborted"]


def stores(worker: StockWorker, *requests: Any) -> bool:
    """Whether a step stores."""
    begin(worker, *requests)
    worker.wait_for_save()
    return "wait_for_save" in worker.lmcache.heard


@pytest.mark.parametrize("fault", ["raises", "connector", "lmcache"])
def test_a_failed_load_withholds_its_step_and_the_one_on_its_way(make, fault):
    worker, lmcache = make()
    begin(worker, described())
    match fault:
        case "raises":
            lmcache.fails = {"start_load_kv"}
        case "connector":
            lmcache.lmcache_engine.gpu_connector.failed_slots.append(torch.arange(40, 44))
        case "lmcache":
            lmcache.lost = {10}
    worker.start_load_kv(CONTEXT)
    worker.wait_for_save()
    assert "wait_for_save" not in lmcache.heard
    assert lmcache.unpinned == ["r"]
    assert worker.get_block_ids_with_load_errors() == {10}
    assert worker.get_block_ids_with_load_errors() == set()
    assert not stores(worker, described("other", 20, loads=False))
    assert stores(worker, described("other", 20, loads=False))


def test_vllm_may_ask_for_failures_before_the_store(make):
    worker, lmcache = make()
    begin(worker, described())
    lmcache.lost = {10}
    assert worker.get_block_ids_with_load_errors() == {10}
    worker.wait_for_save()
    assert "wait_for_save" not in lmcache.heard


def test_a_layer_that_raises_ends_the_loads_of_its_step(make):
    worker, lmcache = make(layerwise=True)
    lmcache.fails = {"wait_for_layer_load"}
    begin(worker, described("a"), described("b", 20), described("c", 30, loads=False))
    lmcache.layerwise_retrievers = [iter(())]
    for name in ("one", "two"):
        worker.wait_for_layer_load(name)
    assert lmcache.heard.count("wait_for_layer_load") == 1
    assert worker.get_block_ids_with_load_errors() == {10, 20}


def test_layers_are_stored_while_a_step_computes_and_each_once(make):
    worker, lmcache = make(layerwise=True)
    lmcache.kv_caches = {"one": None, "two": None}
    begin(worker, described(loads=False))
    for name in ("one", "two", "one"):
        worker.save_kv_layer(name, None, None)
    assert lmcache.heard == ["save_kv_layer"] * 2
    worker.wait_for_save()
    assert lmcache.heard == ["save_kv_layer"] * 2 + ["wait_for_save"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_loads_layers_stores_when_all_are_there(make, fails):
    worker, lmcache = make(layerwise=True)
    lmcache.kv_caches = {"one": None, "two": None}
    begin(worker, described())
    lmcache.layerwise_retrievers = [iter(())]
    for name in ("one", "two", "one"):
        worker.wait_for_layer_load(name)
        worker.save_kv_layer(name, None, None)
    assert lmcache.heard == ["wait_for_layer_load"] * 2
    if fails:
        lmcache.lost = {10}
    worker.wait_for_save()
    assert lmcache.heard[2:] == ([] if fails else ["save_kv_layer"] * 2 + ["wait_for_save"])


def test_a_store_that_raises_ends_the_stores_of_its_step(make):
    worker, lmcache = make(layerwise=True)
    lmcache.kv_caches = {"one": None, "two": None}
    lmcache.fails = {"save_kv_layer"}
    begin(worker, described("a", loads=False), described("b", 20, loads=False))
    worker.save_kv_layer("one", None, None)
    worker.save_kv_layer("two", None, None)
    worker.wait_for_save()
    assert lmcache.heard == ["save_kv_layer"] + ["wait_for_save"] * 2  # LMCache forgets each
    assert set(lmcache.unpinned) == {"a", "b"}
    lmcache.fails = set()
    assert stores(worker, described("a", loads=False))


def test_a_store_of_whole_chunks_that_raises_leaves_no_pins(make):
    worker, lmcache = make()
    lmcache.fails = {"wait_for_save"}
    assert stores(worker, described("a", loads=False), described("b", 20, loads=False))
    assert set(lmcache.unpinned) == {"a", "b"}


def test_chunks_of_several_tiers_are_computed_and_leave_the_cpu_tier(make):
    worker, lmcache = make(layerwise=True)
    lmcache.lmcache_engine.lookup_pins["a"] = {POOL: [1, 2], "disk": [3]}
    scattered, whole = described("a"), described("b", 20)
    begin(worker, scattered, whole)
    assert scattered.load_spec is None
    assert whole.load_spec is not None
    assert lmcache.unpinned == ["a"]
    assert lmcache.removed == [([1, 2], [POOL])]
    assert worker.get_block_ids_with_load_errors() == {10}


def test_under_other_weights_nothing_is_loaded_or_stored(make):
    worker, lmcache = make()
    worker.change_weights()
    assert not lmcache.healthy  # LMCache's look-ups find nothing then
    request = described()
    begin(worker, request)
    assert request.load_spec is None
    assert worker.get_block_ids_with_load_errors() == {10}
    for _ in range(3):
        assert not stores(worker, described(loads=False))


def test_a_load_without_attention_metadata_is_loaded_all_the_same(make):
    worker, lmcache = make()
    seen: list[Any] = []
    lmcache.start_load_kv = lambda context, **more: seen.append(context.attn_metadata)
    context = SimpleNamespace(attn_metadata=None)
    for loads in (True, False):
        begin(worker, described(loads=loads))
        worker.start_load_kv(context)
    assert seen == [{}, None]
    assert context.attn_metadata is None


@pytest.mark.parametrize("fault", ["a tier", "all"])
def test_an_lmcache_that_did_not_come_up_is_refused(make, fault, monkeypatch):
    monkeypatch.setattr(module, "ending_on_failure", nullcontext)
    worker, lmcache = make()
    if fault == "all":
        lmcache.healthy = False
    else:
        del lmcache.tiers["disk"]
    tiers = r"\['LocalCPUBackend'\]" if fault == "a tier" else r"\[\]"
    with pytest.raises(SeamError, match=f"found LMCache tiers {tiers}"):
        worker.register_kv_caches({"layer": torch.zeros(1)})


END = """
import json, os, sys, threading
from pathlib import Path
from types import SimpleNamespace
import torch
from support import storage
from support.caches import Spec, build
from lmcache_xpu.stock.gpu_connectors import StandardConnector
from lmcache_xpu.stock.worker import StockWorker
from lmcache_xpu.versions.lmcache import in_process_module

LMCacheEngineBuilder = in_process_module("v1.cache_engine").LMCacheEngineBuilder
config, metadata = storage.make_config(Path(os.environ["DISK"])), storage.make_metadata()
metadata.engine_id, metadata.kv_connector_extra_config = "engine", {}
cache = build(Spec("LBHNC", layers=2, blocks=8, tokens=16, dim=64))
connector = StandardConnector.from_metadata(metadata, device="cpu")
engine = LMCacheEngineBuilder.get_or_create(
    "of a test", config, metadata, connector, lambda tensor, src: tensor, lambda value, src: value
)
engine.post_init()
connector.initialize_kvcaches_ptr(kvcaches=cache.engine)
worker = StockWorker.__new__(StockWorker)
worker.engine, worker.lmcache = engine, SimpleNamespace(config=config)
threading._register_atexit(worker.shutdown)
tokens = list(range(64))
found = engine.lookup(tokens=tokens)
engine.store(tokens, kvcaches=cache.engine, slot_mapping=torch.arange(64), offset=0)
if os.environ["WAY"] == "closed":
    worker.shutdown()
    worker.shutdown()
print(json.dumps(found))
"""


def test_a_process_ends_by_itself_when_what_was_queued_is_on_the_disk(tmp_path):
    """LMCache's engine, tiers and threads are real here; the second process is ended, too."""
    place = {"DISK": str(tmp_path / "kv"), "PYTHONHASHSEED": "0"}
    assert run_script(END, timeout=100, WAY="left", **place) == 0
    assert run_script(END, timeout=100, WAY="closed", **place) == 64
