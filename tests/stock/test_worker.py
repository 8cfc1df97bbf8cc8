"""What LMCache is let load and store of a step, and what its errors cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from lmcache_xpu.stock import worker as module
from lmcache_xpu.stock.scheduler import Step, WeightsChanged
from lmcache_xpu.stock.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.stock.worker import StockWorker

BLOCK = 4


class Key:
    """The name of a chunk."""

    def split_layers(self, count: int) -> list[int]:
        return list(range(count))


class Lmcache:
    """LMCache's half of a connector in a worker."""

    def __init__(self, *, layerwise: bool = False) -> None:
        self.heard: list[Any] = []
        self.fails: set[str] = set()
        self.kv_caches: dict[str, Any] = {}
        self.layerwise_retrievers: list[Any] = []
        self._layerwise_save_storers: dict[str, Any] = {}
        self.removed: list[Any] = []
        self.unpinned: list[str] = []
        self.held = {0}  # layers that are stored
        self.lmcache_engine: Any = SimpleNamespace(
            use_layerwise=layerwise,
            num_layers=3,
            is_healthy=lambda: True,
            gpu_connector=None,
            lookup_pins={},
            lookup_unpin=self.unpinned.append,
            token_database=SimpleNamespace(process_tokens=lambda tokens: [(0, 4, Key())]),
            storage_manager=SimpleNamespace(
                contains=lambda layer: layer in self.held,
                batched_remove=lambda *arguments: self.removed.append(arguments),
            ),
        )

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any, **more: Any) -> None:
            self.heard.append(name)
            if name in self.fails:
                raise RuntimeError("planted")

        return called

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


def described(name: str = "r", first: int = 10, *, loads: bool = True) -> Any:
    """A request of eight tokens, of which LMCache has four."""
    load = SimpleNamespace(can_load=loads, vllm_cached_tokens=0, lmcache_cached_tokens=4)
    return SimpleNamespace(
        req_id=name,
        token_ids=list(range(8)),
        slot_mapping=torch.arange(8) + first * BLOCK,
        load_spec=load if loads else None,
        save_spec=SimpleNamespace(can_save=True),
    )


def step(*requests: Any, new: frozenset[int] = frozenset(), **more: Any) -> Step:
    return Step(SimpleNamespace(requests=list(requests)), new, **more)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(module.health, "log_connector", lambda *arguments: None)

    def made(**options: Any) -> tuple[StockWorker, Lmcache]:
        lmcache = Lmcache(**options)
        return StockWorker(lmcache, None, UnfilledBlocks(BLOCK)), lmcache

    return made


CONTEXT = SimpleNamespace(attn_metadata={})


def test_a_step_is_lmcache_s_own(make):
    worker, lmcache = make()
    request = described()
    worker.begin_step(step(request, ended=("aborted",)))
    worker.load(CONTEXT, {})
    worker.wait_for_save()
    assert lmcache.heard == ["start_load_kv", "wait_for_save"]
    assert request.save_spec.can_save
    assert lmcache.unpinned == ["aborted"]
    assert worker.take_unfilled() == set()
    assert worker.report() is None


def test_loads_that_raise_are_computed_and_not_stored(make):
    worker, lmcache = make()
    lmcache.fails = {"start_load_kv"}
    loading, computing = described("a"), described("b", 20, loads=False)
    worker.begin_step(step(loading, computing))
    worker.load(CONTEXT, {})
    worker.wait_for_save()
    assert not loading.save_spec.can_save
    assert computing.save_spec.can_save
    assert worker.take_unfilled() == {10}
    later = described("a", loads=False)  # on its way when vLLM hears of it
    worker.begin_step(step(later))
    worker.wait_for_save()
    assert not later.save_spec.can_save
    anew = described("c", loads=False)
    worker.begin_step(step(anew, new=frozenset({10, 11})))
    worker.wait_for_save()
    assert anew.save_spec.can_save


def test_a_layer_that_raises_ends_the_loads_of_its_step(make):
    worker, lmcache = make(layerwise=True)
    lmcache.fails = {"wait_for_layer_load"}
    worker.begin_step(step(described()))
    worker.load(CONTEXT, {})
    lmcache.layerwise_retrievers = [iter(())]
    for name in ("one", "two"):
        worker.wait_for_layer(name)
    assert lmcache.heard.count("wait_for_layer_load") == 1
    assert worker.take_unfilled() == {10}


def test_lmcache_hears_once_of_each_layer(make):
    worker, lmcache = make(layerwise=True)
    worker.begin_step(step(described()))
    lmcache.layerwise_retrievers = [iter(())]
    for name in ("one", "two", "one"):
        worker.wait_for_layer(name)
        worker.save_layer(name, None, None)
    assert lmcache.heard == ["wait_for_layer_load", "save_kv_layer"] * 2


@pytest.mark.parametrize("held", [{0, 1}, {0, 1, 2}])
def test_a_store_that_raises_takes_back_layers_of_chunks_that_miss_some(make, held):
    worker, lmcache = make(layerwise=True)
    lmcache.held = held
    lmcache.fails = {"save_kv_layer"}
    request = described(loads=False)
    worker.begin_step(step(request))
    store = (layer for layer in range(3))
    lmcache._layerwise_save_storers["r"] = store
    worker.save_layer("one", None, None)
    assert list(store) == []
    assert not request.save_spec.can_save
    assert lmcache.removed == ([] if len(held) == 3 else [([0, 1, 2],)])


def test_a_store_that_raises_leaves_no_pins(make):
    worker, lmcache = make()
    lmcache.fails = {"wait_for_save"}
    worker.begin_step(step(described("a"), described("b", 20)))
    worker.wait_for_save()
    assert lmcache.unpinned == ["a", "b"]


def test_chunks_of_several_tiers_are_computed_and_leave_the_cpu_tier(make):
    worker, lmcache = make(layerwise=True)
    lmcache.lmcache_engine.lookup_pins["a"] = {"LocalCPUBackend": [1, 2], "disk": [3]}
    scattered, whole = described("a"), described("b", 20)
    worker.begin_step(step(scattered, whole))
    assert scattered.load_spec is None
    assert whole.load_spec is not None
    assert lmcache.unpinned == ["a"]
    assert lmcache.removed == [([1, 2], ["LocalCPUBackend"])]
    assert worker.take_unfilled() == {10}


def test_under_other_weights_nothing_is_loaded_or_stored(make):
    worker, _ = make()
    worker.change_weights()
    request = described()
    worker.begin_step(step(request))
    assert request.load_spec is None
    assert not request.save_spec.can_save
    assert worker.take_unfilled() == {10}
    assert isinstance(worker.report(), WeightsChanged)


def test_a_promise_that_no_one_was_told_of_is_a_failed_load(make):
    worker, _ = make()
    worker.begin_step(step(unserved=frozenset({7}), new=frozenset({7})))
    assert worker.take_unfilled() == {7}


def test_what_another_rank_lacks_is_not_stored_here(make):
    worker, _ = make()
    worker._ranks = object()
    worker._unfilled.share = lambda group: worker._unfilled._unfilled.add(11)
    request = described()
    worker.begin_step(step(request))
    worker.wait_for_save()
    assert not request.save_spec.can_save
    assert worker.take_unfilled() == set()  # the other one reports it


def test_a_load_without_attention_metadata_is_loaded_all_the_same(make):
    worker, lmcache = make()
    seen: list[Any] = []
    lmcache.start_load_kv = lambda context, **more: seen.append(context.attn_metadata)
    context = SimpleNamespace(attn_metadata=None)
    worker.begin_step(step(described()))
    worker.load(context, {})
    worker.begin_step(step(described(loads=False)))
    worker.load(context, {})
    assert seen == [{}, None]
    assert context.attn_metadata is None
