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

A "layer" of this protocol is a group of the model's layers (`layers_at_once`), because LMCache
spends time on each object, and the link is slow with small copies. Within a group the engine's
stream still waits layer by layer.

LMCache gives up its host memory before the last step of the protocol, so a load holds a reference
until the copies are done. vLLM must not run such a step as one graph:
`requires_piecewise_for_cudagraph` answers from the setting that LMCache uses.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.errors import TransferError
from lmcache_xpu.gpu_connector.base import PagedMemConnector
from lmcache_xpu.gpu_connector.load_pipeline import LoadPipeline
from lmcache_xpu.gpu_connector.registered_cache import RegisteredCache, TransferRequest
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU
from lmcache_xpu.transfer.devices import TransferHandle


class VLLMPagedMemLayerwiseXPUConnector(PagedMemConnector):
    """Copies chunks of one layer, KV_T2D `[tokens, 2, hidden]` or KV_MLA_FMT `[tokens, hidden]`.

    With `layers_at_once` it copies a group of layers in a row: `[layers * tokens, ...]`. Groups
    are of equal size; the end of the last group's memory may be left as it is.

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

        The engine's stream waits for a layer with the next step, or with `overlap.loads` when
        `InFlight` hears of it. Host
        memory is held until its copies are done, also when the generator is closed half-way. A
        layer that has fewer objects than chunks ends the load there: the slots from the first
        missing chunk on go to `failed_slots`.

        Args:
            starts, ends: first token of each chunk, and the one after its last.
            kwargs: see `TransferRequest`.

        Raises:
            TransferError: arguments or a layer's objects that don't fit (that layer is not
                touched), a layer that is missing, or one too many.
            LayoutError: a KV cache that can't be read.
        """
        request = TransferRequest.read(kwargs)
        cache = self._registration.register(request.kvcaches)
        group_starts = self._group_starts(cache, starts, ends, request)
        load = _RequestLoad(cache, request, starts, ends, group_starts)
        owner = request.owner or self._loads_in_flight

        def finished(seconds: float) -> None:  # of the chunks that are left by then
            self._count(LOAD_CPU, cache, load.starts, load.ends, request.cached, seconds)

        try:
            for number, (first, last) in enumerate(self.groups):
                objs = yield
                if objs is None:
                    raise TransferError(f"no memory objects for layer {number}", "one per chunk")
                if len(objs) < len(load.starts):  # a tier lost the rest since the look-up
                    self.failed_slots.append(load.keep(len(objs)))
                load.add(objs, first, last)
                if owner is None:
                    load.step(objs, first)
                elif first == 0:
                    owner.add_load(load.pipeline, objs, finished)
                else:
                    owner.hold(load.pipeline, objs)
            if (yield) is not None:
                raise TransferError(f"a layer {len(self.groups)}", f"{len(self.groups)} layers")
            if owner is None:
                load.pipeline.before_all()
        finally:
            if owner is None:
                load.close()
                finished(sum(handle.seconds() for handle in load.pipeline.handles()))
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

        Each step enqueues a layer behind what the engine has enqueued, and returns when the layer
        before is complete on the host. With `overlap.stores` it returns at once, and
        `InFlight.publish` waits instead.

        Args:
            memory_objs: `[layer][chunk]`.
            starts, ends: of each chunk, as in a load; chunks need not follow each other.
            kwargs: see `TransferRequest`.

        Raises:
            TransferError: arguments that don't fit; nothing was changed.
            LayoutError: a KV cache that can't be read.
        """
        request = TransferRequest.read(kwargs)
        cache = self._registration.register(request.kvcaches)
        plan = cache.plan(starts, ends, request, loading=False)
        if len(memory_objs) != len(self.groups):
            raise TransferError(f"objects of {len(memory_objs)} layers", f"{len(self.groups)}")
        memory = [cache.memory(objs, starts, ends, loading=False) for objs in memory_objs]
        finished = functools.partial(self._count, STORE_CPU, cache, starts, ends, 0)
        if (in_flight := self._stores_in_flight) is not None:
            slots = request.slots(starts, ends)
        handles: list[TransferHandle] = []  # by group
        try:
            for objs, group, (first, last) in zip(memory_objs, memory, self.groups, strict=True):
                cache.stager.follow_engine()  # these layers' attention is enqueued by now
                with cache.stager.whole():
                    stored = cache.stager.store(plan.of_layers(last - first), group, first)
                handles.append(stored.transfer)
                if in_flight is not None:
                    in_flight.add_store(objs, stored, slots)
                elif len(handles) > 1:
                    handles[-2].done.synchronize()  # it is published next
                yield
        finally:
            if in_flight is None and handles:
                handles[-1].done.synchronize()
        if in_flight is not None:
            in_flight.release((), handles, finished)
        else:
            finished(sum(handle.seconds() for handle in handles))
        yield
        raise _ended("store", len(self.groups) + 1)


class _RequestLoad:
    """The load of a request's chunks, whose memory comes group by group.

    Others enqueue it and hold its memory, see `InFlight` and `AsyncLoad`; or each step enqueues a
    group and lets the engine wait for the one before: `step` and `close`.

    It runs behind what the engine has enqueued so far, since blocks may have been freed by a step
    that is running. `group_starts` has the first layer of each group that is waited for at once.
    """

    def __init__(
        self,
        cache: RegisteredCache,
        request: TransferRequest,
        starts: Sequence[int],
        ends: Sequence[int],
        group_starts: Sequence[int],
    ) -> None:
        self.cache = cache
        self.request = request
        self.starts = starts
        self.ends = ends
        self._request_count = len(starts)  # also of chunks that a tier has lost
        self._group_starts = group_starts
        self._plan = cache.plan(starts, ends, request, loading=True)
        if request.owner is None:
            cache.stager.follow_engine()
        self.pipeline = LoadPipeline(cache.stager, request.slots(starts, ends))
        # Each group's objects, with the number of the pipeline's layer groups up to theirs.
        self._held: list[tuple[int, Sequence[MemoryObj]]] = []

    def keep(self, count: int) -> torch.Tensor:
        """Go on with the first `count` chunks; return the slots `[tokens]` from the next one on."""
        slots = self.request.slot_mapping[self.starts[count] :]
        self.starts, self.ends = self.starts[:count], self.ends[:count]
        self._plan = self.cache.plan(self.starts, self.ends, self.request, loading=True)
        return slots

    def add(self, memory_objs: Sequence[MemoryObj], first: int, last: int) -> None:
        """Give the pipeline the memory of layers `first` to `last - 1`.

        Raises:
            HostMemoryError: an object that does not fit its chunk.
            TransferError: more objects than the request has chunks.
        """
        if len(memory_objs) > self._request_count:
            raise TransferError(
                f"{len(memory_objs)} memory objects", f"{self._request_count} chunks"
            )
        objs = memory_objs[: len(self.starts)]
        memory = self.cache.memory(objs, self.starts, self.ends, loading=True)
        starts = [0, *(start - first for start in self._group_starts if first < start < last)]
        self.pipeline.add(self._plan.of_layers(last - first, starts), memory, first)

    def step(self, memory_objs: Sequence[MemoryObj], first_layer: int) -> None:
        """Enqueue a group that the pipeline has, and hold its memory until it is copied.

        LMCache lets go of it before the last step.
        """
        self.pipeline.after_layer(first_layer)
        for memory_obj in memory_objs:
            memory_obj.ref_count_up()
        self._held.append((len(self.pipeline), memory_objs))
        self.pipeline.before_layer(first_layer - 1)

    def close(self) -> None:
        """Wait on the host until everything is copied, and let go of its memory."""
        if not self.pipeline.waited_for():  # after an error a part may be on its way
            self.cache.stager.fence().done.synchronize()
        for groups, memory_objs in self._held:
            self.pipeline.synchronize(groups)
            for memory_obj in memory_objs:
                memory_obj.ref_count_down()


def _ended(transfer: str, steps: int) -> TransferError:
    return TransferError(f"a {transfer} advanced beyond its end", f"{steps} steps")
