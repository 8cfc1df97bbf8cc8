"""What a transfer costs the engine's thread: work of Python for a request, hardly any for a chunk.

Counted in calls of this package's functions, which a busy machine does not change.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from support.caches import Spec, bits, build
from support.connectors import make, slots_of
from support.imitation import ON_HOST
from support.tuned import tuned

from lmcache_xpu.gpu_connector import base
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.transfer import host_copies
from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES
from lmcache_xpu.transfer.staging import Stager

pytestmark = pytest.mark.skipif(not ON_HOST, reason="an accelerator's way, imitated on the host")

LAYERS, CHUNK = 6, 4
FEW, MANY = 8, 136  # chunks; one staging buffer holds them all
CALLS_PER_CHUNK = 2  # for all layers


class Case:
    """A store of one request and its load, through staging buffers."""

    def __init__(self, kind: type, chunks: int) -> None:
        self.source, self.target = (build(Spec("LBNHC", layers=LAYERS, blocks=MANY)) for _ in "ab")
        self.storer, self.loader = make(self.source, kind), make(self.target, kind)
        starts = list(range(0, chunks * CHUNK, CHUNK))
        self.spans = starts, [start + CHUNK for start in starts]
        slots = slots_of(*range(chunks))
        self.call = {"slot_mapping": slots, "offset": 0, "sync": True}
        shape, fmt = self.loader.get_shape(CHUNK), self.loader.FORMAT
        size = shape.numel() * torch.bfloat16.itemsize
        objects = LAYERS if kind is VLLMPagedMemLayerwiseXPUConnector else 1
        pool = torch.zeros(objects, chunks, size, dtype=torch.uint8)
        # Two references: this memory is never given back to an allocator.
        facts = functools.partial(MemoryObjMetadata, shape, torch.bfloat16, 0, size, 2, fmt=fmt)
        self.objs = [[TensorMemoryObj(raw, facts(), None) for raw in group] for group in pool]

    def store(self) -> None:
        arguments = {**self.call, "kvcaches": self.source.engine}
        if isinstance(self.storer, VLLMPagedMemXPUConnectorV2):
            self.storer.batched_from_gpu(self.objs[0], *self.spans, **arguments)
        else:
            steps = self.storer.batched_from_gpu(self.objs, *self.spans, **arguments)
            for _ in (*self.objs, None):
                next(steps)

    def load(self) -> None:
        arguments = {**self.call, "kvcaches": self.target.engine}
        if isinstance(self.loader, VLLMPagedMemXPUConnectorV2):
            self.loader.batched_to_gpu(self.objs[0], *self.spans, **arguments)
        else:
            steps = self.loader.batched_to_gpu(*self.spans, **arguments)
            for objs in (None, *self.objs, None):
                steps.send(objs)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch):
    """An accelerator's way, with a pool of memory that a driver pins."""

    def stager(view: Any, staging_bytes: int | None) -> Stager:
        return Stager(view, SMALLEST_STAGING_BYTES, in_place=False)

    monkeypatch.setattr(base, "Stager", stager)
    monkeypatch.setattr(host_copies, "register_host", lambda *memory: True)
    with tuned(pool_bytes=1):
        yield


def calls(action: Callable[[], None]) -> int:
    """How many of this package's functions an action calls; each time that a generator goes on."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and "lmcache_xpu" in frame.f_globals.get("__name__", "")

    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "kind", [VLLMPagedMemXPUConnectorV2, VLLMPagedMemLayerwiseXPUConnector], ids=["std", "layers"]
)
@pytest.mark.parametrize("action", [Case.store, Case.load], ids=["store", "load"])
def test_hardly_any_python_for_a_chunk(kind: type, action: Callable[[Case], None]):
    counts = []
    for chunks in (FEW, MANY):
        case = Case(kind, chunks)
        case.store()  # also makes what a cache keeps
        case.load()
        counts.append(calls(lambda case=case: action(case)))
        moved = chunks * CHUNK
        for plane in range(case.source.planes):
            for layer in range(LAYERS):
                source, target = (
                    cache.truth[plane][layer].flatten(0, 1)[:moved]
                    for cache in (case.source, case.target)
                )
                assert torch.equal(bits(target), bits(source))
    assert (counts[1] - counts[0]) / (MANY - FEW) <= CALLS_PER_CHUNK, counts
