"""The two halves of the connector: what LMCache is told, where vLLM and LMCache disagree."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from support.halves import BLOCK, Adapter, Facade, worker_side

from lmcache_xpu.cache_engine.engine import CacheEngine
from lmcache_xpu.cache_engine.factory import Adapter as RealAdapter
from lmcache_xpu.cache_engine.kv_cache_facts import check_model
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import scheduler, worker
from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.step_metadata import StepMetadata
from lmcache_xpu.kv_connector.worker import WorkerSide

STEP = {"attention": "of the step"}


def step(*can_load: bool | None) -> StepMetadata:
    """A step of requests that have something to load, have nothing yet, or never had (None)."""
    specs = [None if can is None else SimpleNamespace(can_load=can) for can in can_load]
    return StepMetadata([SimpleNamespace(load_spec=spec, save_spec=None) for spec in specs])


@pytest.mark.parametrize(
    ("can_load", "in_context", "given", "seen"),
    [
        ((True,), STEP, {}, STEP),
        ((True,), None, {"attn_metadata": STEP}, STEP),
        # A step that is one graph, up to vLLM 0.26: LMCache would skip the load, and the engine
        # compute from whatever the blocks hold. Seen on a card: no block of a hit was restored.
        ((None, True), None, {}, {}),
        ((None, False), None, {}, None),
    ],
)
def test_a_load_is_not_skipped_for_want_of_attention_metadata(can_load, in_context, given, seen):
    side = worker_side(adapter := Adapter())
    side.bind(metadata := step(*can_load))
    context: Any = SimpleNamespace(attn_metadata=in_context)
    side.start_load(context, given)
    assert adapter.seen == [("load", (metadata, seen))]
    assert context.attn_metadata == in_context


def begin_two_steps(side: WorkerSide) -> list[Any]:
    """The calls in which vLLM makes a step, twice; what LMCache was told to load."""
    adapter: Any = side._adapter
    facade = Facade(worker=side)
    for _ in range(2):
        metadata = step(True)
        facade.begin_step(metadata)
        adapter.seen.append(("prepared", ()))
        facade.bind_connector_metadata(metadata)
        facade.start_load_kv(SimpleNamespace(attn_metadata=STEP))
        facade.end_enqueueing()
        facade.clear_connector_metadata()
    return adapter.seen


def test_a_step_loads_once_and_before_vllm_prepares_it():
    (_, one), (prepared, _), (_, two), (prepared_again, _) = begin_two_steps(worker_side())
    assert (prepared, prepared_again) == ("prepared", "prepared")
    assert one[0] is not two[0]
    assert (one[1], two[1]) == ({}, {}), "LMCache skips a load without attention metadata"


def test_blocks_that_vllm_zeroes_are_loaded_after_that():
    seen = begin_two_steps(worker_side(loads_early=False))
    assert [what for what, _ in seen] == ["prepared", "load"] * 2


def test_a_step_begins_once(monkeypatch):
    began: list[Any] = []
    in_flight = SimpleNamespace(begin_step=lambda *facts: began.append(facts))
    monkeypatch.setattr(worker, "may_run_as_one_graph", lambda *args: False)
    begin_two_steps(worker_side(in_flight=in_flight))
    assert len(began) == 2


class Beside:
    """What runs beside the engine, as far as a load that begins early tells it."""

    def __init__(self, *, loads: bool = True) -> None:
        self.loads, self.told = loads, []

    def schedule(self, written: frozenset[int], tokens: int) -> None:
        self.told.append((written, tokens))


def load_of_one() -> StepMetadata:
    return StepMetadata(["one"], new_blocks=frozenset({3}), tokens=5)


def test_a_load_begins_between_two_steps_and_leaves_no_trace_of_one():
    adapter, beside = Adapter(), Beside()
    metadata = load_of_one()
    assert worker_side(adapter, in_flight=beside).begin_load(metadata)
    assert adapter.seen == [("load", (metadata, {}))]
    assert beside.told == [({3}, 5)]
    assert adapter.step is None


@pytest.mark.parametrize(
    ("loads_early", "in_flight", "layerwise", "under_way"),
    [
        (False, Beside(), False, None),  # vLLM zeroes blocks when it prepares the step
        (True, None, False, None),
        (True, Beside(loads=False), False, None),
        (True, Beside(), True, None),
        (True, Beside(), False, step()),
    ],
)
def test_a_load_that_must_wait_for_its_step_does_not_begin(
    loads_early, in_flight, layerwise, under_way
):
    adapter = Adapter(use_layerwise=layerwise)
    adapter.step = under_way
    side = worker_side(adapter, in_flight=in_flight, loads_early=loads_early)
    assert not side.begin_load(load_of_one())
    assert adapter.seen == []


def test_a_load_that_other_weights_have_outdated_does_not_begin():
    side = worker_side(adapter := Adapter(), in_flight=Beside())
    side.epoch.change_weights()
    assert not side.begin_load(load_of_one())
    assert adapter.seen == []
    assert adapter.lmcache_engine.refuses_lookups


@pytest.mark.parametrize(
    ("group", "found"),
    [
        (None, False),  # in another process
        (SimpleNamespace(_vllm_config="ours"), False),  # another connector
        (SimpleNamespace(_vllm_config="another's", worker_side="a half"), False),
        (SimpleNamespace(_vllm_config="ours", worker_side="a half"), True),
    ],
)
def test_the_scheduler_finds_the_worker_of_its_own_engine(group, found: bool, monkeypatch):
    from vllm.distributed import kv_transfer

    def config(engine: str) -> SimpleNamespace:
        return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine))

    if group is not None:
        group = SimpleNamespace(**vars(group) | {"_vllm_config": config(group._vllm_config)})
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: group is not None)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: group)
    side = SchedulerSide(SimpleNamespace(lookup_client=SimpleNamespace()), config("ours"), 16)
    assert side._worker() == ("a half" if found else None)


@pytest.mark.parametrize("near", [False, True])
def test_garbage_waits_from_a_look_up_to_the_end_of_scheduling_or_of_the_step(near, monkeypatch):
    adapter = SimpleNamespace(
        lookup_client=SimpleNamespace(), build_connector_meta=lambda step: StepMetadata()
    )
    side = SchedulerSide(adapter, None, 16)
    half = SimpleNamespace(collection=GarbageCollection(), epoch=SimpleNamespace(changed=None))
    monkeypatch.setattr(side, "_worker", lambda: half if near else None)
    monkeypatch.setattr(scheduler, "written_blocks", lambda *args: frozenset())
    asked = SimpleNamespace(
        request_id="r",
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
    )
    side.admit(asked, 0)
    assert not gc.isenabled()
    cached = SimpleNamespace(resumed_req_ids=set())
    side.describe(
        SimpleNamespace(
            scheduled_new_reqs=[], total_num_scheduled_tokens=1, scheduled_cached_reqs=cached
        )
    )
    assert gc.isenabled() is not near
    half.collection.allow()
    assert gc.isenabled()


@pytest.mark.parametrize("setting", [None, "remote_storage_plugins", "remote_url"])
def test_a_worker_whose_tier_may_take_long_is_not_called(setting: str | None):
    adapter = Adapter()
    if setting is not None:
        setattr(adapter.config, setting, "a server")
    near = worker_side(adapter).near_engine()
    assert near is (None if setting else adapter.lmcache_engine)


class Calls:
    """A step with a drafter's layer behind two of the model."""

    def __init__(self) -> None:
        in_flight = SimpleNamespace(
            begin_step=lambda *facts: None,
            before_layer=lambda layer: None,
            after_layer=lambda layer: None,
            end_step=list,
        )
        self.adapter = Adapter()
        layers = ("model.0", "model.1", "draft")
        self.side = worker_side(self.adapter, in_flight=in_flight, layers=layers)
        self.side.bind(step())

    def forward(self, *layers: str) -> None:
        for layer in layers:
            self.side.wait_for_layer(layer)
            self.side.save_layer(layer, None, None)


def test_lmcache_hears_of_each_layer_once_however_many_tokens_are_drafted():
    """It counts calls: one more ends its generators, and with them the engine."""
    calls = Calls()
    calls.forward("model.0", "model.1", "draft", "draft", "draft")
    calls.side.wait_for_save()
    each = [(name, layer) for layer in calls.side.layers for name in ("wait", "save")]
    assert calls.adapter.seen == [*each, ("save", "")]


def test_a_step_without_its_drafter_stores_whole_chunks():
    calls = Calls()
    calls.forward("model.0", "model.1")
    calls.side.wait_for_save()
    assert calls.adapter.seen[-2:] == [("save", "draft"), ("save", "")]


def test_a_step_that_computes_nothing_stores_nothing():
    calls = Calls()
    calls.side.wait_for_save()
    assert calls.adapter.seen == [("save", "")]


class Lmcache(RealAdapter):
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


SLOTS = torch.arange(24) + 10 * BLOCK  # blocks 10 to 15


def request(slots: torch.Tensor = SLOTS) -> Any:
    spec = SimpleNamespace(can_save=True)
    return SimpleNamespace(req_id="r", slot_mapping=slots, save_spec=spec, load_spec=None)


@pytest.mark.parametrize("reporter", ["connector", "LMCache", "in flight"])
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_step_stores_nothing_that_read_an_unfilled_block(asked_first: bool, reporter: str):
    adapter, missed = Adapter(), []
    in_flight = SimpleNamespace(begin_step=lambda *facts: None, end_step=lambda: [*missed])
    side = worker_side(adapter, in_flight=in_flight)
    reader, other = request(), request(SLOTS + 100)
    side.bind(StepMetadata([reader, other]))
    if reporter == "connector":
        adapter.lmcache_engine.gpu_connector.failed_slots.append(SLOTS[-BLOCK:])
    elif reporter == "LMCache":
        adapter.invalid.add(15)
    else:
        missed.append(SLOTS[-BLOCK:])
    if asked_first:  # vLLM may ask for the blocks before it completes the stores
        assert side.take_unfilled() == {15}
        missed.clear()
    side.wait_for_save()
    missed.clear()
    assert adapter.dropped == [reader]
    side.clear()
    assert side.take_unfilled() == (set() if asked_first else {15})


def config_of(method: str | None = None, *, hybrid: bool = False) -> SimpleNamespace:
    text = SimpleNamespace(model_type="qwen3_next", layer_types=["linear_attention"])
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid, hf_text_config=text),
        speculative_config=None if method is None else SimpleNamespace(method=method),
    )


@pytest.mark.parametrize("device", ["xpu", "cuda"])
def test_vllm_hears_why_a_model_is_not_served_before_it_fails_on_its_layers(device, monkeypatch):
    import vllm.platforms

    platform = SimpleNamespace(device_type=device)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    ask = LMCacheXPUConnector.get_required_kvcache_layout
    assert ask(config_of()) is None
    if device == "cuda":  # LMCache's own connector, as it is
        assert ask(config_of(hybrid=True)) is None
        return
    with pytest.raises(SettingsError, match=r"linear_attention in a qwen3_next.*--no-offload"):
        ask(config_of(hybrid=True))


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "eagle3", "mtp"])
def test_drafters_like_the_model_or_without_a_cache_are_served(method):
    check_model(config_of(method))


@pytest.mark.parametrize("method", ["draft_model", "dflash", "extract_hidden_states"])
def test_drafters_with_caches_of_their_own_are_refused(method):
    with pytest.raises(SettingsError, match=f"{method}.*ngram, eagle, eagle3 or mtp"):
        check_model(config_of(method))


def test_lmcaches_memory_is_pinned_while_nobody_waits():
    """A driver takes seconds to register many GiB; the first store would wait for it."""
    pinned: list[Any] = []
    gpu = SimpleNamespace(initialize_kvcaches_ptr=lambda kvcaches: None, pin=pinned.append)
    backend = SimpleNamespace(memory_allocator=SimpleNamespace(buffer="memory"))
    manager = SimpleNamespace(storage_backends={"LocalCPUBackend": backend})
    engine: Any = SimpleNamespace(gpu_connector=gpu, storage_manager=manager)
    beside: Any = Beside()
    CacheEngine.register(engine, [], beside)
    assert pinned == ["memory"]
    assert gpu.overlap is manager.in_flight is beside
    manager.storage_backends = {}  # LMCache without a CPU tier
    CacheEngine.register(engine, [], beside)
    assert pinned == ["memory"]
