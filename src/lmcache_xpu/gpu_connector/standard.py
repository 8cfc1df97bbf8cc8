"""The standard connector: whole chunks of all layers between vLLM's KV cache and LMCache.

LMCache calls it in the engine's worker, from one thread. Keyword arguments end here: `binding`
reads those it knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.gpu_connector.load_pipeline import LayeredLoad
from lmcache_xpu.gpu_connector.registered_cache import Binding, Bound, ConnectorOptions, Request
from lmcache_xpu.metrics import LOAD_CPU, STORE_CPU, Flow
from lmcache_xpu.transfer.staging_ring import STAGING_BYTES


class PagedMemConnector(GPUConnectorInterface):  # type: ignore[misc]  # untyped base
    """What is the same for both connectors: how they are made, and their host memory's shape.

    Args:
        hidden_dim_size: elements of one token in one plane: heads x head size.
        num_layers: layers of the model.
        use_gpu: accepted for LMCache; staging is decided by where the memory is.
        kwargs: see `ConnectorOptions`; `use_xpu` is another name for `use_gpu`.

    Raises:
        SettingsError: an unknown option.
    """

    FORMAT: MemoryFormat
    LAYERWISE: bool

    def __init__(
        self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **kwargs: Any
    ) -> None:
        self.use_gpu = bool(kwargs.pop("use_xpu", use_gpu))
        options = ConnectorOptions.read(kwargs)
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self.use_mla = options.use_mla
        self.overlap: InFlight | None = None  # set by who tells the connector of the engine's steps
        self.failed_slots: list[torch.Tensor] = []  # of loads that ended early; for vLLM
        self._binding = Binding(
            hidden_dim_size, num_layers, options, self.FORMAT, layerwise=self.LAYERWISE
        )

    @classmethod
    def from_metadata(
        cls,
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | str | None = None,
        *,
        layout_hints: Mapping[str, str] | None = None,
        opaque_blocks: bool = False,
        staging_bytes: int = STAGING_BYTES,
        layers_at_once: int = 1,
        layer_major: bool = False,
    ) -> Self:
        """A connector for an engine as LMCache describes it."""
        layers, _, chunk_size, heads, head_size = metadata.kv_shape
        return cls(
            heads * head_size,
            layers,
            use_gpu,
            chunk_size=chunk_size,
            dtype=metadata.kv_dtype,
            device=device,
            use_mla=metadata.use_mla,
            layout_hints=layout_hints,
            opaque_blocks=opaque_blocks,
            staging_bytes=staging_bytes,
            layers_at_once=layers_at_once,
            layer_major=layer_major,
        )

    @property
    def groups(self) -> Sequence[tuple[int, int]]:
        """Of each memory object of a chunk its first layer, and the one after its last."""
        return self._binding.groups

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Shape of the host memory of `num_tokens` tokens."""
        return self._binding.host_shape(num_tokens)

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Bind to the engine's KV cache, given as `kvcaches`; cheap when it is bound already.

        Allocates staging memory.

        Raises:
            LayoutError: a KV cache that can't be read.
            SettingsError: no memory for staging.
        """
        if (kvcaches := kwargs.get("kvcaches")) is not None:
            self._binding.bind(kvcaches)

    def pin(self, pool: torch.Tensor) -> None:
        """Pin LMCache's memory now, when nobody waits, where the device does not reach it yet."""
        self._binding.bind(None).stager.pin(pool)

    @property
    def _loads_beside(self) -> InFlight | None:
        return self.overlap if self.overlap is not None and self.overlap.loads else None

    @property
    def _stores_beside(self) -> InFlight | None:
        return self.overlap if self.overlap is not None and self.overlap.stores else None

    def _cuts(self, bound: Bound, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """First layer of each group of layers that a load of these chunks waits for at once."""
        if self._loads_beside is None:
            return [0]
        tokens = sum(ends) - sum(starts)
        return self._loads_beside.cuts(self.num_layers, tokens, self._layer_bytes(bound, tokens))

    def _layer_bytes(self, bound: Bound, tokens: int) -> int:
        layer_size = self.get_shape(1).numel() // self.groups[0][1]
        return tokens * layer_size * bound.view.dtype.itemsize

    def _counter(
        self,
        flow: Flow,
        bound: Bound,
        starts: Sequence[int],
        ends: Sequence[int],
        cached: int = 0,
    ) -> Callable[[float], None]:
        """To be told how many seconds these chunks took."""
        spans = zip(starts, ends, strict=True)
        tokens = sum(end - max(start, min(end, cached)) for start, end in spans)
        size = self.num_layers * self._layer_bytes(bound, tokens)
        return functools.partial(flow.moved, size_bytes=size, tokens=tokens)


class VLLMPagedMemXPUConnectorV2(PagedMemConnector):
    """Copies whole chunks, KV_2LTD `[2, layers, tokens, hidden]` or KV_MLA_FMT `[1, ...]`.

    With `layer_major` keys and values of a layer lie together, `[layers, 2, tokens, hidden]` behind
    the same shape: one layer of a chunk is one copy, twice as large.
    """

    FORMAT = MemoryFormat.KV_2LTD
    LAYERWISE = False

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load one chunk; see `batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store one chunk; see `batched_from_gpu`."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    @torch.inference_mode()
    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Load chunks into the engine's KV cache.

        Chunk i holds tokens `starts[i]:ends[i]` of the request. Tokens below
        `vllm_cached_tokens` and with negative slots are left alone. The copies run behind what
        the engine has enqueued and before what it enqueues next; host memory may be reused as
        soon as this returns. With `overlap.loads` this returns at once, and the engine waits layer
        by layer (see there).

        Args:
            memory_objs: LMCache's memory, one per chunk.
            starts: first token of each chunk.
            ends: token after the last of each chunk.
            kwargs: see `Request`.

        Raises:
            TransferError: arguments that don't fit; nothing was changed.
            LayoutError: a KV cache that can't be read.
        """
        request = Request.read(kwargs)
        bound = self._binding.bind(request.kvcaches)
        beside = self._loads_beside
        cuts = self._cuts(bound, starts, ends)
        plan = self._binding.plan(bound, starts, ends, request, loading=True, cuts=cuts)
        memory = self._binding.memory(bound, memory_objs, starts, ends, loading=True)
        # Blocks may have been freed by a step that is still running.
        bound.stager.follow_engine()
        if beside is not None:
            load = LayeredLoad(bound.stager, request.slots(starts, ends))
            load.add(plan, memory)
            beside.add_load(
                load, memory_objs, self._counter(LOAD_CPU, bound, starts, ends, request.cached)
            )
            return
        with bound.stager.whole():
            moved = bound.stager.load(plan, memory)
        moved.done.wait()  # the engine's stream
        count = self._counter(LOAD_CPU, bound, starts, ends, request.cached)
        moved.done.synchronize()  # LMCache gives up the host memory when this returns
        count(moved.seconds())

    @torch.inference_mode()
    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Store chunks from the engine's KV cache; complete on the host when this returns.

        With `overlap.stores` this returns at once, and LMCache's objects are complete when
        `InFlight.publish` lets them go.

        Arguments and errors as for `batched_to_gpu`. Tokens with negative slots leave their
        part of the host memory as it is.
        """
        request = Request.read(kwargs)
        bound = self._binding.bind(request.kvcaches)
        plan = self._binding.plan(bound, starts, ends, request, loading=False)
        memory = self._binding.memory(bound, memory_objs, starts, ends, loading=False)
        bound.stager.follow_engine()
        with bound.stager.whole():
            stored = bound.stager.store(plan, memory)
        count = self._counter(STORE_CPU, bound, starts, ends)
        if (beside := self._stores_beside) is not None:
            beside.add_store(memory_objs, stored, request.slots(starts, ends))
            beside.release((), [stored.moved], count)
            return
        stored.moved.done.synchronize()  # LMCache publishes it at once
        count(stored.moved.seconds())
