"""A load of one request beside an engine, and events that are reached when a test says so."""

from __future__ import annotations

import threading

import torch
from support import caches
from support.caches import Spec, bits, build
from support.connectors import make, memory, slots_of

from lmcache_xpu.copies.load_pipelines import LoadPipeline, StepPipelines
from lmcache_xpu.metrics import LOAD_CPU
from lmcache_xpu.transfer.slots import request_rows

SPANS = STARTS, ENDS = [0, 4, 8], [4, 8, 11]
LAYERS = 6


def settle() -> None:
    if caches.DEVICE != "cpu":
        torch.accelerator.synchronize()


class Point:
    """An event that is reached when the test says so."""

    def __init__(self, reached: bool = False) -> None:
        self._reached = threading.Event()
        self.waited = 0
        if reached:
            self._reached.set()

    def reach(self) -> None:
        self._reached.set()

    def reached(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        assert self._reached.wait(20)

    def wait(self) -> None:
        self.waited += 1


class Case:
    """A cache, the loads of a step, and chunks that hold what another cache has."""

    def __init__(self, **options) -> None:
        spec = Spec("BLHNC", layers=LAYERS)
        self.source, self.target = build(spec), build(spec)
        self.slots = slots_of(4, 1, 3)[:11]
        connector = make(self.source, **options)
        self.objs = [memory(connector, end - start) for start, end in zip(*SPANS, strict=True)]
        self.call = {"starts": STARTS, "ends": ENDS, "slot_mapping": self.slots}
        connector.batched_from_gpu(self.objs, kvcaches=self.source.engine, **self.call)
        self.connector = make(self.target, **options)
        self.step = StepPipelines()

    def load(self) -> None:
        if not self.step.loads:
            self.step.begin(1000)
        self.step.add(self.pipeline())

    def pipeline(self) -> LoadPipeline:
        """A load of the chunks, in the layer groups that the step asks for."""
        connector, tokens = self.connector, len(self.slots)
        stager = connector.registered(self.target.engine)
        layer_bytes = connector.get_shape(tokens).numel() // LAYERS * stager.view.dtype.itemsize
        starts = self.step.group_starts(tokens, LAYERS, layer_bytes)
        stager.follow_engine()
        rows = request_rows(stager.view, self.slots, list(zip(*SPANS, strict=True)))
        plan = stager.plan(connector.host_format, rows, starts)
        objects = connector.memory(stager, self.objs, STARTS, ENDS, loading=True)
        return LoadPipeline(stager, plan, objects, LOAD_CPU)

    def there(self, layer: int) -> bool:
        settle()
        return all(
            torch.equal(
                bits(self.target.token(plane, layer, slot)),
                bits(self.source.token(plane, layer, slot)),
            )
            for plane in range(2)
            for slot in self.slots.tolist()
        )


def expected(case: Case) -> torch.Tensor:
    """The target with the request's tokens from the source, and nothing else changed."""
    fresh = build(case.target.spec, case.target.raw.clone())
    for plane in range(2):
        for layer in range(LAYERS):
            for slot in case.slots.tolist():
                fresh.put(plane, layer, slot, case.source.token(plane, layer, slot))
    return fresh.raw
