"""Both connectors beside an engine on an Intel GPU, imitated: blocks of 64 tokens, LBNHC."""

from __future__ import annotations

import pytest
import torch
from support.caches import Spec, bits, build
from support.connectors import make, memory, slots_of
from support.imitation import Machine
from support.intel import INTEL
from support.intel import machine as machine  # a fixture

from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2

LAYERS, BLOCK, CHUNK = 4, 64, 128  # vLLM's block there, and chunks of two
SPEC = Spec("LBNHC", layers=LAYERS, blocks=10, tokens=BLOCK)
HERE, THERE = slots_of(7, 2, 4, 9, tokens=BLOCK), slots_of(3, 8, 1, 6, tokens=BLOCK)
STARTS, ENDS = [0, CHUNK], [CHUNK, 2 * CHUNK]

ON_INTEL = pytest.mark.parametrize("machine", INTEL, indirect=True, ids=str)


class Engine:
    """A cache of blocks that lie scattered, and a step of an engine in its own stream."""

    def __init__(self) -> None:
        self.cache = build(SPEC)
        self.connector = make(self.cache, VLLMPagedMemXPUConnectorV2, layer_major=True)
        self.layerwise = make(self.cache, VLLMPagedMemLayerwiseXPUConnector)
        for connector in (self.connector, self.layerwise):
            connector.initialize_kvcaches_ptr(kvcaches=self.cache.engine)

    def compute(self, layer: int, slots: torch.Tensor) -> None:
        """Write the KV of some tokens, behind what the engine has enqueued."""
        for plane in self.cache.truth:
            for slot in slots.tolist():
                plane[layer][slot // BLOCK, slot % BLOCK].view(torch.uint8).random_(0, 256)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """What attention sees of some tokens in a layer: enqueued, and nothing is waited for."""
        places = [(slot // BLOCK, slot % BLOCK) for slot in slots.tolist()]
        return torch.stack([plane[layer][at] for plane in self.cache.truth for at in places])


def chunks(connector) -> list:
    return [memory(connector, CHUNK) for _ in STARTS]


@ON_INTEL
def test_a_chunk_goes_and_comes_between_steps(machine: Machine):
    engine = Engine()
    call = {"kvcaches": engine.cache.engine}
    for layer in range(LAYERS):
        engine.compute(layer, HERE)
    seen = torch.stack([engine.read(layer, HERE) for layer in range(LAYERS)])
    objs = chunks(engine.connector)
    engine.connector.batched_from_gpu(objs, STARTS, ENDS, slot_mapping=HERE, **call)
    for layer in range(LAYERS):
        engine.compute(layer, HERE)  # the blocks are given to another request
        engine.compute(layer, THERE)  # of the request that had these blocks before
    engine.connector.batched_to_gpu(objs, STARTS, ENDS, slot_mapping=THERE, **call)
    values = torch.stack([engine.read(layer, THERE) for layer in range(LAYERS)])
    assert torch.equal(bits(values), bits(seen))
    assert {obj.metadata.ref_count for obj in objs} == {1}


@ON_INTEL
def test_layers_go_and_come_beside_the_engine(machine: Machine):
    engine = Engine()
    layers = [chunks(engine.layerwise) for _ in range(LAYERS)]
    call = {"kvcaches": engine.cache.engine}
    steps = engine.layerwise.batched_from_gpu(layers, STARTS, ENDS, slot_mapping=HERE, **call)
    seen = []
    for layer in range(LAYERS):
        engine.compute(layer, HERE)
        seen.append(engine.read(layer, HERE))
        next(steps)
    next(steps)
    for layer in range(LAYERS):
        engine.compute(layer, HERE)
        engine.compute(layer, THERE)
    steps = engine.layerwise.batched_to_gpu(STARTS, ENDS, slot_mapping=THERE, **call)
    next(steps)
    steps.send(layers[0])
    values = []
    for layer in range(LAYERS):
        steps.send(layers[layer + 1] if layer + 1 < LAYERS else None)
        values.append(engine.read(layer, THERE))
    assert torch.equal(bits(torch.stack(values)), bits(torch.stack(seen)))
