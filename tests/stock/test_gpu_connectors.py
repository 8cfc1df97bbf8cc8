"""Errors of copies end in slots to recompute, and the generators go on to their ends."""

from __future__ import annotations

import pytest
import torch

from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.stock.gpu_connectors import LayerwiseConnector, StandardConnector
from lmcache_xpu.versions.lmcache import in_process_module

BLOCK, CHUNK, LAYERS = 4, 8, 3
SLOTS = torch.arange(3 * CHUNK) + 10 * BLOCK  # blocks 10 to 15


class Pinned:
    """An object of LMCache's."""

    pins = 0

    def pin(self):
        self.pins += 1


def failed(connector: StandardConnector | LayerwiseConnector) -> list[int]:
    return [slot for slots in connector.failed_slots for slot in slots.tolist()]


@pytest.mark.parametrize("cached", [0, 6])
def test_a_failed_load_reports_its_slots_but_those_that_the_engine_has(cached, monkeypatch):
    monkeypatch.setattr(VLLMPagedMemXPUConnectorV2, "batched_to_gpu", lambda *_, **__: 1 / 0)
    connector = StandardConnector(16, LAYERS)
    kwargs = {"slot_mapping": SLOTS, "vllm_cached_tokens": cached}
    connector.batched_to_gpu([], [0, CHUNK], [CHUNK, 2 * CHUNK], **kwargs)
    assert failed(connector) == SLOTS[cached:].tolist()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_failed_layer_ends_the_copies_and_not_the_load(layer, monkeypatch):
    def load_until(self, starts, ends, **kwargs):
        for number in range(LAYERS + 2):
            taken.append((yield))
            if number == layer:
                raise RuntimeError("planted")

    monkeypatch.setattr(VLLMPagedMemLayerwiseXPUConnector, "batched_to_gpu", load_until)
    taken = []
    connector = LayerwiseConnector(16, LAYERS)
    load = connector.batched_to_gpu([CHUNK], [3 * CHUNK], slot_mapping=SLOTS)
    next(load)
    objs = [[Pinned()] for _ in range(LAYERS)]
    for number in range(LAYERS):
        load.send(objs[number])
    next(load)
    assert len(taken) == layer + 1
    assert failed(connector) == SLOTS[CHUNK:].tolist()
    assert [obj.pins for (obj,) in objs] == [1] * LAYERS  # which LMCache takes back at its end


def test_a_load_that_finds_less_than_was_promised_reports_the_rest():
    connector = LayerwiseConnector(16, LAYERS)
    load = connector.batched_to_gpu([0], [CHUNK], slot_mapping=SLOTS[: 2 * CHUNK])
    next(load)
    assert set(failed(connector)) >= set(SLOTS[CHUNK : 2 * CHUNK].tolist())


def test_lmcache_takes_our_layerwise_connector_for_one_of_its_own():
    check = in_process_module("v1.gpu_connector.utils").assert_layerwise_gpu_connector
    check(LayerwiseConnector(16, LAYERS))
    with pytest.raises(AssertionError):
        check(StandardConnector(16, LAYERS))
