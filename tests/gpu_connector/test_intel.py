"""Both connectors beside an engine on an Intel GPU, imitated: blocks of 64 tokens, LBNHC."""

from __future__ import annotations

import pytest
import torch
from support.caches import Spec, bits, build
from support.connectors import make, memory, slots_of
from support.imitation import Machine
from support.intel import INTEL
from support.intel import machine as machine  # a fixture

from lmcache_xpu.gpu_connector.in_flight import InFlight
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
        self.overlap = InFlight(block_tokens=BLOCK)
        self.connector = make(self.cache, VLLMPagedMemXPUConnectorV2, layer_major=True)
        self.layerwise = make(
            self.cache, VLLMPagedMemLayerwiseXPUConnector, layers_at_once=LAYERS // 2
        )
        for connector in (self.connector, self.layerwise):
            connector.overlap = self.overlap
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

    def begin(self, written: torch.Tensor, **options) -> None:
        self.overlap.begin_step(frozenset((written // BLOCK).tolist()), **options)


def chunks(connector) -> list:
    return [memory(connector, CHUNK) for _ in STARTS]


def stored(engine: Engine) -> tuple[list, torch.Tensor]:
    """Chunks of what a step computed, and its bytes."""
    for layer in range(LAYERS):
        engine.compute(layer, HERE)
    seen = torch.stack([engine.read(layer, HERE) for layer in range(LAYERS)])
    objs = chunks(engine.connector)
    engine.connector.batched_from_gpu(
        objs, STARTS, ENDS, kvcaches=engine.cache.engine, slot_mapping=HERE
    )
    return objs, seen


def arrived(engine: Engine, seen: torch.Tensor) -> None:
    """Every layer holds the bytes when the engine comes to it, without another wait."""
    values = []
    for layer in range(LAYERS):
        engine.overlap.before_layer(layer)
        values.append(engine.read(layer, THERE))
        engine.overlap.after_layer(layer)
    assert engine.overlap.end_step() == []
    assert torch.equal(bits(torch.stack(values)), bits(seen))
    engine.overlap.drain()


@ON_INTEL
def test_a_chunk_goes_and_comes_beside_the_engine(machine: Machine):
    engine = Engine()
    objs, seen = stored(engine)
    engine.begin(HERE)  # the blocks are given to another request: they have been read by then
    for layer in range(LAYERS):
        engine.compute(layer, HERE)
    published = []
    engine.overlap.publish(objs, lambda: published.append(1))
    engine.overlap.drain()
    assert published
    engine.begin(THERE)
    for layer in range(LAYERS):
        engine.compute(layer, THERE)  # of the request that had these blocks before
    engine.connector.batched_to_gpu(
        objs, STARTS, ENDS, kvcaches=engine.cache.engine, slot_mapping=THERE
    )
    arrived(engine, seen)
    assert {obj.metadata.ref_count for obj in objs} == {1}


@ON_INTEL
def test_groups_of_layers_go_and_come_beside_the_engine(machine: Machine):
    engine = Engine()
    groups = [chunks(engine.layerwise) for _ in engine.layerwise.groups]
    call = {"kvcaches": engine.cache.engine}
    steps = engine.layerwise.batched_from_gpu(groups, STARTS, ENDS, slot_mapping=HERE, **call)
    seen = []
    for (first, last), objs in zip(engine.layerwise.groups, groups, strict=True):
        for layer in range(first, last):
            engine.compute(layer, HERE)
            seen.append(engine.read(layer, HERE))
        next(steps)
        engine.overlap.publish(objs, list)
    next(steps)
    engine.begin(torch.cat([HERE, THERE]))
    for layer in range(LAYERS):
        engine.compute(layer, HERE)
        engine.compute(layer, THERE)
    engine.overlap.drain()
    steps = engine.layerwise.batched_to_gpu(STARTS, ENDS, slot_mapping=THERE, **call)
    next(steps)
    values = []
    for (first, last), objs in zip(engine.layerwise.groups, groups, strict=True):
        steps.send(objs)
        for layer in range(first, last):
            engine.overlap.before_layer(layer)
            values.append(engine.read(layer, THERE))
            engine.overlap.after_layer(layer)
    next(steps)
    assert engine.overlap.end_step() == []
    assert torch.equal(bits(torch.stack(values)), bits(torch.stack(seen)))
    engine.overlap.drain()


EARLY = [
    *((machine, machine.kernels and machine.memory == "pinned") for machine in INTEL),
    (Machine("xpu, unpinned memory, kernels read the host", "pageable", kernels=True), False),
]


@pytest.mark.parametrize(("machine", "early"), EARLY, indirect=["machine"], ids=str)
def test_a_load_begins_before_its_step_where_kernels_reach_its_memory(machine, early: bool):
    """Copies would go before the engine's own, and may even wait on its thread."""
    engine = Engine()
    objs, seen = stored(engine)
    engine.overlap.publish(objs, list)
    engine.overlap.drain()
    engine.overlap.schedule(frozenset((THERE // BLOCK).tolist()), BLOCK)
    engine.connector.batched_to_gpu(
        objs, STARTS, ENDS, kvcaches=engine.cache.engine, slot_mapping=THERE
    )
    (item,) = engine.overlap._loads
    assert (item.load.enqueued > 0) is early
    engine.begin(THERE)
    arrived(engine, seen)
