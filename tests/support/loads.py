"""A load of one request beside an engine, and events that are reached when a test says so."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from support import caches
from support.caches import Spec, bits, build
from support.connectors import make, memory, slots_of

from lmcache_xpu.copies.load_pipelines import LayerCopy, LoadPipeline, group_starts
from lmcache_xpu.copies.step_loads import StepLoads, _Load
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


class Step(StepLoads):
    """A step of an engine whose layers are named by their numbers, and loads without a server."""

    def __init__(self, draft_layers: int = 0) -> None:
        names = [str(layer) for layer in range(LAYERS)]
        part = SimpleNamespace(names=names, stager=Mock())
        groups: Any = [SimpleNamespace(parts=[part], group=SimpleNamespace(recurrent=False))]
        moves: Any = SimpleNamespace(enqueueing=nullcontext)
        super().__init__(moves, groups, names, draft_layers, LOAD_CPU, print)
        self._thread.shutdown()
        self._thread = SimpleNamespace(submit=lambda act, *args: act(*args))
        self._tokens = 1000

    @property
    def loads(self) -> list[LoadPipeline]:
        return self._pipelines

    def add(self, load: LoadPipeline) -> None:
        unused: Any = None
        begun = _Load("request", [], unused, unused)
        begun.pipeline = load
        self._begin(begun)

    def before_layer(self, layer: int) -> None:
        super().before_layer(str(layer))

    def after_layer(self, layer: int) -> None:
        super().after_layer(str(layer))

    def before_all(self) -> None:
        self.begin(whole=True)

    def end(self) -> list[LoadPipeline]:
        """The loads that failed, or for which the engine did not wait."""
        self._missed: list[LoadPipeline] = []
        super().end()
        return self._missed

    def _decide(self, load: _Load, is_missed: bool) -> None:
        if is_missed:
            self._missed.append(load.pipeline)


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
        self.step = Step()

    def load(self) -> None:
        self.step.add(self.pipeline())

    def pipeline(self) -> LoadPipeline:
        """A load of the chunks, in the layer groups that the step asks for."""
        connector, tokens = self.connector, len(self.slots)
        stager = connector.registered(self.target.engine)
        layer_bytes = connector.get_shape(tokens).numel() // LAYERS * stager.view.dtype.itemsize
        starts = group_starts(LAYERS, layer_bytes, loaded=tokens, computed=1000, early=False)
        stager.follow_engine()
        rows = request_rows(stager.view, self.slots, list(zip(*SPANS, strict=True)))
        plan = stager.plan(connector.host_format, rows, starts)
        objects = connector.memory(stager, self.objs, STARTS, ENDS, loading=True)
        groups = [LayerCopy(each.layers.start, stager, each, objects) for each in plan.groups]
        return LoadPipeline(groups, LOAD_CPU)

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
