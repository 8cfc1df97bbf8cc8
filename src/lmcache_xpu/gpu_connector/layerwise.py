"""The layerwise connector: one layer at a time, while the engine computes the others.

LMCache drives it as generators, one per request, interleaved layer by layer, by the protocol of
`LMCacheEngine.retrieve_layer` and `store_layer`, where N counts layers:

    load    next                 prepare
            send(layer 0) ...    enqueue that layer; the engine's stream waits for the one before
            send(layer N - 1)
            next                 the engine's stream waits for the last layer
    store   next                 enqueue layer 0
            next x (N - 1)       enqueue the next layer; the one before is complete on the host
            next                 layer N - 1 is complete on the host

LMCache gives up its host memory before the last step of the protocol, so a load holds a reference
until the copies are done.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NoReturn

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.errors import TransferError
from lmcache_xpu.gpu_connector.base import PagedMemConnector
from lmcache_xpu.transfer.devices import Event


class VLLMPagedMemLayerwiseXPUConnector(PagedMemConnector):
    """Copies chunks of one layer, KV_T2D `[tokens, 2, hidden]` or KV_MLA_FMT `[tokens, hidden]`.

    Ordering is by an event per layer and request; LMCache's `sync` flag is not needed.
    """

    FORMAT = MemoryFormat.KV_T2D
    LAYERWISE = True

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> NoReturn:
        """Not part of a layerwise connector."""
        raise NotImplementedError("a layerwise connector has batched_to_gpu and batched_from_gpu")

    from_gpu = to_gpu

    @torch.inference_mode()
    def batched_to_gpu(
        self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> Generator[None, Sequence[MemoryObj] | None, None]:
        """Load a request layer by layer; yields `num_layers + 2` times.

        The engine's stream waits for a layer with the next step. Host memory is held until its
        copies are done, also when the generator is closed before its end. Arguments are those of
        `plan`.

        Raises:
            HostMemoryError: an object that does not fit its chunk; its layer is not touched.
            TransferError: arguments that don't fit, a layer with too few or too many objects, or
                too few or too many layers.
            LayoutError: a KV cache that can't be read.
        """
        stager, plan = self.plan(starts, ends, kwargs, loading=True)
        moved: list[Event] = []
        held: list[MemoryObj] = []
        stager.follow_engine()  # blocks may have been freed by a step that is running
        try:
            for layer in range(self.num_layers):
                objs = yield
                if objs is None:
                    raise TransferError(f"no memory objects for layer {layer}", "one per chunk")
                memory = self.memory(stager, objs, starts, ends, loading=True)
                with stager.whole():
                    moved.append(stager.load(plan, memory, layer, idle=layer == 0))
                for memory_obj in objs:
                    memory_obj.ref_count_up()
                held.extend(objs)
                if layer:
                    moved[-2].wait()  # the engine's stream
            if (yield) is not None:
                raise TransferError(f"a layer {self.num_layers}", f"{self.num_layers} layers")
            moved[-1].wait()
        finally:
            if moved:
                moved[-1].synchronize()
            for memory_obj in held:
                memory_obj.ref_count_down()
        yield
        raise TransferError("a load advanced beyond its end", f"{self.num_layers + 2} steps")

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
        before is complete on the host. `memory_objs` are `[layer][chunk]`; chunks need not follow
        each other. The other arguments are those of `plan`. Raises as `plan` and `memory`, or
        TransferError for objects of too few or too many layers; nothing was changed then.
        """
        stager, plan = self.plan(starts, ends, kwargs, loading=False)
        if len(memory_objs) != self.num_layers:
            raise TransferError(f"objects of {len(memory_objs)} layers", f"{self.num_layers}")
        memory = [self.memory(stager, objs, starts, ends, loading=False) for objs in memory_objs]
        moved: list[Event] = []
        try:
            for layer, chunks in enumerate(memory):
                stager.follow_engine()  # this layer's attention is enqueued by now
                with stager.whole():
                    moved.append(stager.store(plan, chunks, layer).done)
                if layer:
                    moved[-2].synchronize()  # it is published next
                yield
        finally:
            if moved:
                moved[-1].synchronize()
        yield
        raise TransferError("a store advanced beyond its end", f"{self.num_layers + 1} steps")
