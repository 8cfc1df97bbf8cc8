"""Which tiers a hit came from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from support.adapter import UnaskedClient
from support.halves import Facade
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_xpu.kv_connector.hit_sources import hit_sources, lone_source
from lmcache_xpu.kv_connector.scheduler import SchedulerSide

HOST, DISK, OTHER = (
    CacheHitSource.HOST,
    CacheHitSource.DISK,
    CacheHitSource.EXTERNAL_UNSPECIFIED,
)
CPU = "LocalCPUBackend"


@pytest.mark.parametrize(
    ("pinned", "tokens", "expected"),
    [
        ({CPU: 4}, 32, {HOST: 32}),
        ({CPU: 4}, 31, {HOST: 31}),  # vLLM computes the last token of a full hit
        ({CPU: 4}, 8, {HOST: 8}),  # the engine has the beginning
        ({CPU: 2, "disk": 2}, 32, {HOST: 16, DISK: 16}),
        ({CPU: 2, "disk": 2}, 20, {HOST: 4, DISK: 16}),
        ({CPU: 2, "disk": 2}, 10, {DISK: 10}),
        ({"disk": 1, "RemoteBackend-shared": 3}, 32, {DISK: 8, OTHER: 24}),
        ({CPU: 1}, 32, {}),
        ({}, 32, {}),
    ],
)
@pytest.mark.parametrize("objects", [1, 3])
def test_a_hit_is_split_by_what_was_found_where(pinned, tokens, expected, objects):
    keys = {name: range(chunks * objects) for name, chunks in pinned.items()}
    assert hit_sources(keys, objects, 8, tokens) == expected
    assert not expected or sum(expected.values()) == tokens


@pytest.mark.parametrize("setting", [None, "storage_plugins", "remote_url", "local_disk"])
def test_with_one_tier_all_hits_come_from_it(setting):
    names = ("storage_plugins", "remote_storage_plugins", "remote_url", "local_disk", "enable_p2p")
    config: Any = SimpleNamespace(**dict.fromkeys(names))
    if setting is not None:
        setattr(config, setting, ["something"])
    assert lone_source(config) == (HOST if setting is None else None)


@pytest.mark.parametrize("layers", [0, 3])
def test_the_scheduler_asks_the_worker_in_its_process(layers: int, monkeypatch):
    config = SimpleNamespace(storage_plugins=["disk"], chunk_size=8)
    side = SchedulerSide(SimpleNamespace(lookup_client=UnaskedClient(), config=config), None, 4)
    engine = SimpleNamespace(
        lookup_pins={"r": {CPU: [0] * 2 * max(layers, 1), "disk": [0] * max(layers, 1)}},
        use_layerwise=bool(layers),
        num_layers=layers,
    )
    monkeypatch.setattr(side, "_worker", lambda: None)
    assert side.hit_sources("r", 20) == {}
    monkeypatch.setattr(side, "_worker", lambda: SimpleNamespace(near_engine=lambda: engine))
    assert side.hit_sources("r", 20) == {HOST: 12, DISK: 8}
    assert side.hit_sources("another", 20) == {}
    config.storage_plugins = None
    assert side.hit_sources("another", 20) == {HOST: 20}


def test_what_is_not_known_is_left_to_vllm():
    scheduler = SimpleNamespace(hit_sources=lambda name, tokens: {})
    made = Facade(scheduler=scheduler)
    request: Any = SimpleNamespace(request_id="r")
    assert made.get_external_cache_hit_sources(request, 5) == {OTHER: 5}
    scheduler.hit_sources = lambda name, tokens: {HOST: tokens}
    assert made.get_external_cache_hit_sources(request, 5) == {HOST: 5}
    assert made.get_external_cache_hit_sources(request, 0) == {}
