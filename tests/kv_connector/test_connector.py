"""vLLM's side: what LMCache's connector is told, where vLLM and LMCache disagree."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from lmcache_xpu.cache_engine.kv_cache_facts import check_model
from lmcache_xpu.cache_engine.near_lookups import NearLookups
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import connector as vllm_connector
from lmcache_xpu.kv_connector import garbage, scheduler
from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from lmcache_xpu.kv_connector.scheduler import SchedulerSide

STEP = {"attention": "of the step"}


def connector(*, served: bool = True, can_load: tuple[bool | None, ...] = (True,)) -> Any:
    made: Any = object.__new__(LMCacheXPUConnector)
    made._served, made._overlap, made._guard, made._epoch = served, None, None, None
    made._loading, made._loads_early, made._publishes = False, True, False
    made._layers, made._loaded_layers, made._stored_layers = {}, set(), set()
    made._lmcache_engine = SimpleNamespace()
    specs = [None if can is None else SimpleNamespace(can_load=can) for can in can_load]
    made._connector_metadata = SimpleNamespace(
        requests=[SimpleNamespace(load_spec=spec) for spec in specs]
    )
    return made


@pytest.mark.parametrize(
    ("made", "in_context", "given", "seen"),
    [
        (connector(), STEP, {}, STEP),
        (connector(), None, {"attn_metadata": STEP}, STEP),
        # A step that is one graph, up to vLLM 0.26: LMCache would skip the load, and the engine
        # compute from whatever the blocks hold. Seen on a card: no block of a hit was restored.
        (connector(can_load=(None, True)), None, {}, {}),
        (connector(can_load=(None, False)), None, {}, None),
        (connector(served=False), None, {}, None),
    ],
)
def test_a_load_is_not_skipped_for_want_of_attention_metadata(
    made, in_context, given, seen, monkeypatch
):
    found = []
    monkeypatch.setattr(
        LMCacheConnectorV1,
        "start_load_kv",
        lambda self, context, **kwargs: found.append(context.attn_metadata),
    )
    context = SimpleNamespace(attn_metadata=in_context)
    made.start_load_kv(context, **given)
    assert found == [seen]
    assert context.attn_metadata == in_context


def begin_two_steps(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls in which vLLM makes a step, twice; what LMCache was told to load."""
    loaded: list[Any] = []
    monkeypatch.setattr(
        LMCacheConnectorV1,
        "start_load_kv",
        lambda self, context, **kwargs: loaded.append(
            (self._get_connector_metadata(), context.attn_metadata)
        ),
    )
    requests = made._connector_metadata.requests
    for _ in range(2):
        meta: Any = SimpleNamespace(requests=requests)
        made.begin_step(meta)
        loaded.append("prepared")
        made.bind_connector_metadata(meta)
        made.start_load_kv(SimpleNamespace(attn_metadata=STEP))
        made.clear_connector_metadata()
    return loaded


def test_a_step_loads_once_and_before_vllm_prepares_it(monkeypatch):
    one, prepared, two, prepared_again = begin_two_steps(connector(), monkeypatch)
    assert (prepared, prepared_again) == ("prepared", "prepared")
    assert one[0] is not two[0]
    assert (one[1], two[1]) == ({}, {}), "LMCache skips a load without attention metadata"


def test_blocks_that_vllm_zeroes_are_loaded_after_that(monkeypatch):
    made = connector()
    made._loads_early = False
    events = begin_two_steps(made, monkeypatch)
    assert [event == "prepared" for event in events] == [True, False, True, False]


def test_a_step_begins_once(monkeypatch):
    made, began = connector(), []
    made._overlap = SimpleNamespace(begin_step=lambda *facts: began.append(facts))
    monkeypatch.setattr(vllm_connector, "may_run_as_one_graph", lambda *args: False)
    made._vllm_config = None
    begin_two_steps(made, monkeypatch)
    assert len(began) == 2


class Beside:
    """What runs beside the engine, as far as a load that begins early tells it."""

    def __init__(self, *, loads: bool = True) -> None:
        self.loads, self.told = loads, []

    def schedule(self, written: frozenset[int], tokens: int) -> None:
        self.told.append((written, tokens))


@contextmanager
def events_of(seen: list[Any]) -> Iterator[None]:
    seen.append("pins stay")
    yield
    seen.append("pins go")


def early(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, list[Any]]:
    """A worker's connector between two steps; what LMCache was told to load."""
    loaded: list[Any] = []
    monkeypatch.setattr(
        LMCacheConnectorV1,
        "start_load_kv",
        lambda self, context, **kwargs: loaded.append(self._get_connector_metadata()),
    )
    made = connector()
    made._connector_metadata, made._overlap = None, Beside()
    made._keys = SimpleNamespace(pinned=lambda: events_of(loaded))
    vars(made).update(changes)
    return made, loaded


def test_a_load_begins_between_two_steps_and_leaves_no_trace_of_one(monkeypatch):
    made, loaded = early(monkeypatch)
    meta = SimpleNamespace(requests=["one"])
    assert made.begin_load(meta, frozenset({3}), 5)
    assert loaded == ["pins stay", meta, "pins go"]
    assert made._overlap.told == [({3}, 5)]
    assert not made.has_connector_metadata()


@pytest.mark.parametrize(
    "changes",
    [
        {"_loads_early": False},  # vLLM zeroes blocks when it prepares the step
        {"_overlap": None},
        {"_overlap": Beside(loads=False)},
        {"_keys": None},  # layerwise
        {"_connector_metadata": SimpleNamespace(requests=[])},  # a step is under way
    ],
)
def test_a_load_that_must_wait_for_its_step_does_not_begin(changes, monkeypatch):
    made, loaded = early(monkeypatch, **changes)
    assert not made.begin_load(SimpleNamespace(requests=["one"]), frozenset(), 5)
    assert loaded == []


@pytest.mark.parametrize(
    ("group", "found"),
    [
        (None, False),  # in another process
        (SimpleNamespace(_vllm_config="ours"), False),  # another connector
        (SimpleNamespace(_vllm_config="another's", begin_load=None), False),
        (SimpleNamespace(_vllm_config="ours", begin_load=None), True),
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
    side = SchedulerSide(SimpleNamespace(lookup_client=None), config("ours"), 16)
    assert side._worker() is (group if found else None)


@pytest.mark.parametrize("worker", [None, SimpleNamespace(weights_changed=None)])
def test_garbage_waits_from_a_look_up_to_the_end_of_scheduling_or_of_the_step(worker, monkeypatch):
    side = SchedulerSide(SimpleNamespace(lookup_client=None), None, 16)
    monkeypatch.setattr(side, "_worker", lambda: worker)
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
    step = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_cached_reqs=cached)
    side.describe(SimpleNamespace(requests=[]), step)
    assert gc.isenabled() is (worker is None)
    garbage.allow()
    assert gc.isenabled()


@pytest.mark.parametrize(("workers", "near"), [(1, True), (2, False)])
def test_look_ups_of_one_worker_alone_may_be_calls(workers: int, near: bool):
    far = SimpleNamespace(world_size=workers)
    client = SimpleNamespace(transport=far, lookup=None)
    SchedulerSide(SimpleNamespace(lookup_client=client), None, 16)
    assert isinstance(client.transport, NearLookups) is near
    assert near or client.transport is far


@pytest.mark.parametrize("setting", [None, "remote_storage_plugins", "remote_url"])
def test_a_worker_whose_tier_may_take_long_is_not_called(setting: str | None):
    made = LMCacheXPUConnector.__new__(LMCacheXPUConnector)
    made._config = SimpleNamespace(remote_storage_plugins=None, remote_url=None)
    made._lmcache_engine = SimpleNamespace(lmcache_engine="LMCache's")
    if setting is not None:
        setattr(made._config, setting, "a server")
    assert made.near_engine() == (None if setting else "LMCache's")


class Calls:
    """LMCache's adapter and what runs beside the engine, with a drafter's layer behind two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str | int]] = []
        for name in ("wait_for_layer_load", "save_kv_layer"):
            monkeypatch.setattr(LMCacheConnectorV1, name, self.lmcache(name))
        monkeypatch.setattr(LMCacheConnectorV1, "wait_for_save", lambda made: self.note("save", ""))
        self.made = connector()
        self.made._layers = {"model.0": 0, "model.1": 1, "draft": 2}
        self.made._overlap = SimpleNamespace(
            before_layer=lambda layer: None, after_layer=lambda layer: None, end_step=list
        )
        self.made._lmcache_engine.layerwise_retrievers = []

    def note(self, what: str, which: str | int) -> None:
        self.seen.append((what, which))

    def lmcache(self, name: str) -> Any:
        return lambda made, layer, *args, **kwargs: self.note(name, layer)

    def forward(self, *layers: str) -> None:
        for layer in layers:
            self.made.wait_for_layer_load(layer)
            self.made.save_kv_layer(layer, None, None)


def test_lmcache_hears_of_each_layer_once_however_many_tokens_are_drafted(monkeypatch):
    """It counts calls: one more ends its generators, and with them the engine."""
    calls = Calls(monkeypatch)
    calls.forward("model.0", "model.1", "draft", "draft", "draft")
    calls.made.wait_for_save()
    each = [(name, layer) for layer in calls.made._layers for name in ("wait", "save")]
    assert [(name.split("_")[0], layer) for name, layer in calls.seen] == [*each, ("save", "")]


def test_a_step_without_its_drafter_stores_whole_chunks(monkeypatch):
    calls = Calls(monkeypatch)
    calls.forward("model.0", "model.1")
    calls.made.wait_for_save()
    assert calls.seen[-2:] == [("save_kv_layer", "draft"), ("save", "")]


def test_a_step_that_computes_nothing_stores_nothing(monkeypatch):
    calls = Calls(monkeypatch)
    calls.made.wait_for_save()
    assert calls.seen == [("save", "")]


def test_a_layerwise_load_comes_to_its_end_before_the_drafter_does(monkeypatch):
    """Else LMCache would never let go of what it took for it."""
    calls, steps = Calls(monkeypatch), iter(range(3))
    calls.made._lmcache_engine.layerwise_retrievers = [steps]
    monkeypatch.setattr(LMCacheConnectorV1, "get_block_ids_with_load_errors", lambda made: set())
    assert calls.made.get_block_ids_with_load_errors() == set()
    assert list(steps) == []
    assert calls.made._lmcache_engine.layerwise_retrievers == []


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


def test_lmcaches_memory_is_pinned_while_nobody_waits(monkeypatch):
    """A driver takes seconds to register many GiB; the first store would wait for it."""
    pinned = []
    gpu = SimpleNamespace(initialize_kvcaches_ptr=lambda kvcaches: None, pin=pinned.append)
    backend = SimpleNamespace(memory_allocator=SimpleNamespace(buffer="memory"))
    manager = SimpleNamespace(storage_backends={"LocalCPUBackend": backend})
    made = connector()
    made._config = None
    made._lmcache_engine.lmcache_engine = SimpleNamespace(
        gpu_connector=gpu, storage_manager=manager
    )
    monkeypatch.setattr(LMCacheConnectorV1, "register_kv_caches", lambda self, caches: None)
    for name in ("check_healthy", "check_tiers"):
        monkeypatch.setattr(vllm_connector.health, name, lambda *args: None)
    monkeypatch.setattr(made, "_run_beside", lambda *args: None)
    made.register_kv_caches({})
    assert pinned == ["memory"]
    manager.storage_backends = {}  # LMCache without a CPU tier
    made.register_kv_caches({})
    assert pinned == ["memory"]
