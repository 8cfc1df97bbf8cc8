"""The layerwise connector: one layer at a time, while the engine computes the others.

LMCache drives it as generators, one per request, interleaved layer by layer. The protocol is
that of LMCache 0.5.6's `LMCacheEngine.retrieve_layer` and `store_layer`, where N counts layers:

    load    next                 prepare
            send(layer 0) ...    enqueue that layer; the engine's stream waits for the one before
            send(layer N - 1)
            next                 the engine's stream waits for the last layer
    store   next                 enqueue layer 0
            next x (N - 1)       enqueue the next layer; the one before is complete on the host
            next                 layer N - 1 is complete on the host

LMCache gives up its host memory before the last step of the protocol, so a load holds a reference
until the copies are done. vLLM must not run such a step as one graph:
`requires_piecewise_for_cudagraph` answers from the setting that LMCache uses.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NoReturn

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.errors import TransferError
from lmcache_xpu.gpu_connector.base import PagedMemConnector
from lmcache_xpu.gpu_connector.registered_cache import RegisteredCache, TransferRequest
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU
from lmcache_xpu.transfer.devices import TransferHandle


class VLLMPagedMemLayerwiseXPUConnector(PagedMemConnector):
    """Copies chunks of one layer, KV_T2D `[tokens, 2, hidden]` or KV_MLA_FMT `[tokens, hidden]`.

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
        """Load a request layer by layer; yields `num_layers + 2` times.

        The engine's stream waits for a layer with the next step. Host memory is held until its
        copies are done, also when the generator is closed half-way. A layer that has fewer objects
        than chunks ends the load there: the slots from the first missing chunk on go to
        `failed_slots`.

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
        load = _RequestLoad(cache, request, starts, ends)
        try:
            for layer in range(self.num_layers):
                objs = yield
                if objs is None:
                    raise TransferError(f"no memory objects for layer {layer}", "one per chunk")
                if len(objs) < len(load.starts):  # a tier lost the rest since the look-up
                    self.failed_slots.append(load.keep(len(objs)))
                load.step(objs, layer)
            if (yield) is not None:
                raise TransferError(f"a layer {self.num_layers}", f"{self.num_layers} layers")
            load.wait_for(self.num_layers - 1)
        finally:
            load.close()
            self._count(LOAD_CPU, cache, load.starts, load.ends, request.cached, load.seconds())
        yield
        raise _ended("load", self.num_layers + 2)

    @torch.inference_mode()
    def batched_from_gpu(
        self,
        memory_objs: Sequence[Sequence[MemoryObj]],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> Generator[None, None, None]:
        """Store a request layer by layer; yields `num_layers + 1` times.

        Each step enqueues a layer behind what the engine has enqueued, and returns when the layer
        before is complete on the host.

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
        if len(memory_objs) != self.num_layers:
            raise TransferError(f"objects of {len(memory_objs)} layers", f"{self.num_layers}")
        memory = [cache.memory(objs, starts, ends, loading=False) for objs in memory_objs]
        handles: list[TransferHandle] = []
        try:
            for layer, chunks in enumerate(memory):
                cache.stager.follow_engine()  # this layer's attention is enqueued by now
                with cache.stager.whole():
                    handles.append(cache.stager.store(plan, chunks, layer).transfer)
                if layer:
                    handles[-2].done.synchronize()  # it is published next
                yield
        finally:
            if handles:
                handles[-1].done.synchronize()
        seconds = sum(handle.seconds() for handle in handles)
        self._count(STORE_CPU, cache, starts, ends, 0, seconds)
        yield
        raise _ended("store", self.num_layers + 1)


class _RequestLoad:
    """The load of a request's chunks, whose memory comes layer by layer.

    It runs behind what the engine has enqueued so far, since blocks may have been freed by a step
    that is running.
    """

    def __init__(
        self,
        cache: RegisteredCache,
        request: TransferRequest,
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self.starts = starts
        self.ends = ends
        self._cache = cache
        self._request = request
        self._request_count = len(starts)  # also of chunks that a tier has lost
        self._plan = cache.plan(starts, ends, request, loading=True)
        self._handles: list[TransferHandle] = []
        self._held: list[MemoryObj] = []
        cache.stager.follow_engine()

    def keep(self, count: int) -> torch.Tensor:
        """Go on with the first `count` chunks; return the slots `[tokens]` from the next one on."""
        slots = self._request.slot_mapping[self.starts[count] :]
        self.starts, self.ends = self.starts[:count], self.ends[:count]
        self._plan = self._cache.plan(self.starts, self.ends, self._request, loading=True)
        return slots

    def step(self, memory_objs: Sequence[MemoryObj], layer: int) -> None:
        """Enqueue a layer, hold its memory until it is copied, and wait for the one before.

        Raises:
            HostMemoryError: an object that does not fit its chunk.
            TransferError: more objects than the request has chunks.
        """
        if len(memory_objs) > self._request_count:
            raise TransferError(
                f"{len(memory_objs)} memory objects", f"{self._request_count} chunks"
            )
        objs = memory_objs[: len(self.starts)]
        memory = self._cache.memory(objs, self.starts, self.ends, loading=True)
        with self._cache.stager.whole():
            handle = self._cache.stager.load(self._plan, memory, layer, idle=layer == 0)
        self._handles.append(handle)
        for memory_obj in objs:
            memory_obj.ref_count_up()
        self._held.extend(objs)
        self.wait_for(layer - 1)

    def wait_for(self, layer: int) -> None:
        """Let the engine's stream wait for a layer."""
        if layer >= 0:
            self._handles[layer].done.wait()

    def close(self) -> None:
        """Wait on the host until everything is copied, and let go of its memory."""
        if self._handles:
            self._handles[-1].done.synchronize()
        held, self._held = self._held, []
        for memory_obj in held:
            memory_obj.ref_count_down()

    def seconds(self) -> float:
        """Return the time that its copies took."""
        return sum(handle.seconds() for handle in self._handles)


def _ended(transfer: str, steps: int) -> TransferError:
    return TransferError(f"a {transfer} advanced beyond its end", f"{steps} steps")
