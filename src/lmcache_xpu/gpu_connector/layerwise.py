"""The layerwise connector: one layer at a time, while the engine computes the others.

LMCache drives it as generators, one per request, interleaved layer by layer. The protocol is
that of LMCache 0.5.6's `LMCacheEngine.retrieve_layer` and `store_layer`, where N counts memory
objects of a chunk:

    load    next                 prepare
            send(layer 0) ...    enqueue that layer; the engine's stream waits for the one before
            send(layer N - 1)
            next                 the engine's stream waits for the last layer
    store   next                 enqueue layer 0
            next x (N - 1)       enqueue the next layer; the one before is complete on the host
            next                 layer N - 1 is complete on the host

With `layers_at_once` a "layer" of this protocol is a group of the model's layers: fewer objects for
LMCache to handle, and larger copies.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NoReturn

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.errors import TransferError
from lmcache_xpu.gpu_connector.load_pipeline import LayeredLoad
from lmcache_xpu.gpu_connector.registered_cache import Request
from lmcache_xpu.gpu_connector.standard import PagedMemConnector
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU
from lmcache_xpu.transfer.staging import Moved


class VLLMPagedMemLayerwiseXPUConnector(PagedMemConnector):
    """Copies chunks of one layer, KV_T2D `[tokens, 2, hidden]` or KV_MLA_FMT `[tokens, hidden]`.

    With `layers_at_once` of a group of layers, one after another: `[layers * tokens, ...]`. Groups
    are of equal size; the end of the last one's memory may be left as it is.

    Ordering is by an event per layer and request. LMCache's `sync` flag is not needed: it is
    given to one request of a batch alone.
    """

    FORMAT = MemoryFormat.KV_T2D
    LAYERWISE = True

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> NoReturn:
        """Not part of a layerwise connector."""
        raise NotImplementedError("a layerwise connector loads with batched_to_gpu")

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> NoReturn:
        """Not part of a layerwise connector."""
        raise NotImplementedError("a layerwise connector stores with batched_from_gpu")

    @torch.inference_mode()
    def batched_to_gpu(
        self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> Generator[None, Sequence[MemoryObj] | None, None]:
        """Load a request layer by layer; yields `len(groups) + 2` times.

        A layer's copy overlaps what the engine computes of the layers before it. Its stream waits
        for a layer with the next step, or with `overlap.loads` when `InFlight` hears of it. Host
        memory is held until its copies are done, also when the generator is closed half-way. A
        layer that has fewer objects than chunks ends the load there: the slots from the first
        missing chunk on go to `failed_slots`.

        Args:
            starts: first token of each chunk.
            ends: token after the last of each chunk.
            kwargs: see `Request`.

        Raises:
            TransferError: arguments or a layer's objects that don't fit (that layer is not
                touched), a layer that is missing, or one too many.
            LayoutError: a KV cache that can't be read.
        """
        request = Request.read(kwargs)
        bound = self._binding.bind(request.kvcaches)
        plan = self._binding.plan(bound, starts, ends, request, loading=True)
        bound.stager.follow_engine()  # blocks may have been freed by a step that is running
        load = LayeredLoad(bound.stager, request.slots(starts, ends))
        held: list[tuple[int, Sequence[MemoryObj]]] = []  # with the number of cuts up to theirs
        count = len(starts)
        beside = self._loads_beside
        cuts = self._cuts(bound, starts, ends)

        def finished(seconds: float) -> None:
            self._counter(LOAD_CPU, bound, starts[:count], ends[:count], request.cached)(seconds)

        try:
            for layer, (first, last) in enumerate(self.groups):
                objs = yield
                if objs is None:
                    raise TransferError(f"no memory objects for layer {layer}", "one per chunk")
                if len(objs) > len(starts):
                    raise TransferError(f"{len(objs)} memory objects", f"{len(starts)} chunks")
                if len(objs) < count:  # a tier lost the rest since the look-up
                    count = len(objs)
                    self.failed_slots.append(request.slot_mapping[starts[count] :])
                    plan = self._binding.plan(
                        bound, starts[:count], ends[:count], request, loading=True
                    )
                spans = starts[:count], ends[:count]
                memory = self._binding.memory(bound, objs[:count], *spans, loading=True)
                here = [0, *(cut - first for cut in cuts if first < cut < last)]
                load.add(plan.of_layers(last - first, here), memory, first)
                # LMCache lets go of them before the last step.
                if beside is None:
                    load.after_layer(first)
                    for obj in objs:
                        obj.ref_count_up()
                    held.append((len(load), objs))
                    load.before_layer(first - 1)
                elif first == 0:
                    beside.add_load(load, objs, finished)
                else:
                    beside.hold(load, objs)
            if (yield) is not None:
                raise TransferError(f"a layer {len(self.groups)}", f"{len(self.groups)} layers")
            if beside is None:
                load.before_all()
        finally:
            if beside is None:
                if not load.waited_for():  # after an error a part may be on its way
                    bound.stager.fence().done.synchronize()
                for enqueued, objs in held:
                    load.synchronize(enqueued)
                    for obj in objs:
                        obj.ref_count_down()
                finished(sum(moved.seconds() for moved in load.moved()))
        yield
        raise _ended("load", len(self.groups) + 2)

    @torch.inference_mode()
    def batched_from_gpu(
        self,
        memory_objs: Sequence[Sequence[MemoryObj]],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> Generator[None, None, None]:
        """Store a request layer by layer; yields `len(groups) + 1` times.

        Each step enqueues one layer behind what the engine has enqueued, and returns when the
        layer before is complete on the host, because LMCache publishes that one next. With
        `overlap.stores` it returns at once, and `InFlight.publish` waits instead.

        Args:
            memory_objs: `[layer][chunk]`.
            starts: first token of each chunk; chunks need not follow each other.
            ends: token after the last of each chunk.
            kwargs: see `Request`.

        Raises:
            TransferError: arguments that don't fit; nothing was changed.
            LayoutError: a KV cache that can't be read.
        """
        request = Request.read(kwargs)
        bound = self._binding.bind(request.kvcaches)
        plan = self._binding.plan(bound, starts, ends, request, loading=False)
        if len(memory_objs) != len(self.groups):
            raise TransferError(f"objects of {len(memory_objs)} layers", f"{len(self.groups)}")
        memory = [
            self._binding.memory(bound, objs, starts, ends, loading=False) for objs in memory_objs
        ]
        slots = request.slots(starts, ends)
        beside = self._stores_beside
        moved: list[Moved] = []
        try:
            for objs, group, (first, last) in zip(memory_objs, memory, self.groups, strict=True):
                bound.stager.follow_engine()  # these layers' attention is enqueued by now
                with bound.stager.whole():
                    stored = bound.stager.store(plan.of_layers(last - first), group, first)
                moved.append(stored.moved)
                if beside is not None:
                    beside.add_store(objs, stored, slots)
                else:
                    for before in moved[-2:-1]:
                        before.done.synchronize()
                yield
        finally:
            if beside is None:
                for end in moved[-1:]:
                    end.done.synchronize()
        count = self._counter(STORE_CPU, bound, starts, ends)
        if beside is not None:
            beside.release((), moved, count)
        else:
            count(sum(one.seconds() for one in moved))
        yield
        raise _ended("store", len(self.groups) + 1)


def _ended(what: str, steps: int) -> TransferError:
    return TransferError(f"a {what} advanced beyond its end", f"{steps} steps")
