"""A transfer that fails half-way on a device: nothing of it may arrive later."""

from __future__ import annotations

import oracle
import pytest
import torch
import ways
from host import Arena
from late_device import LateDevice, PlantedError
from layouts import Cache, Layout

LAYOUT = Layout(
    form="fused",
    memory="lbhnc",
    sizes={"l": 3, "b": 4, "n": 2, "h": 1, "c": 4},
    padding={},
    lead=0,
    dtype=torch.bfloat16,
    named=True,
)
SPANS = ((0, 2), (2, 4), (4, 6))


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "ring"])
@pytest.mark.parametrize("direction", ["batched_to_gpu", "batched_from_gpu"])
@pytest.mark.parametrize("order", ["planes", "rows"])
def test_nothing_arrives_after_the_error(order, direction, pinned, number):
    """LMCache gives its memory to others, and vLLM computes the blocks anew."""
    way = ways.Way(order, False, 100, 2, pinned)
    cache, device = Cache(LAYOUT, 1), LateDevice(())
    connector = ways.connect(LAYOUT, way)
    groups = ways.groups_of(connector)
    arena = Arena(3 * len(groups), connector.get_shape(2).numel() * 2, 1)
    fmt = ways.format_of(connector)
    objs = [
        [arena.allocate(connector.get_shape(2), LAYOUT.dtype, fmt) for _ in SPANS] for _ in groups
    ]
    arguments = {
        "starts": [start for start, _ in SPANS],
        "ends": [end for _, end in SPANS],
        "kvcaches": cache.engine,
        "slot_mapping": torch.arange(6),
    }
    with ways.taken(way, 2 * cache.paged.row * 2), device.installed():
        connector.initialize_kvcaches_ptr(kvcaches=cache.engine)
        device.fail_at(number)
        with pytest.raises(PlantedError):
            ways.call(connector, direction, objs, **arguments)
        assert device.failed
        for obj in (obj for group in objs for obj in group):
            obj.ref_count_down()  # and others write there
        there = cache.bytes()
        device.finish()
    oracle.compare("the cache", cache.bytes(), there)
    oracle.compare("host memory", arena.bytes(), arena.wanted)
