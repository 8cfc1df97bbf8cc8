"""The standard connector: whole chunks of all layers between vLLM's KV cache and LMCache.

LMCache calls it in the engine's worker, from one thread. Nothing past this file takes keyword
arguments that it does not name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.devices import is_host
from lmcache_xpu.engine_layout import Geometry
from lmcache_xpu.errors import HostMemoryError, LayoutError, SettingsError, SlotError, TransferError
from lmcache_xpu.paged_view import EngineLayer, PagedView
from lmcache_xpu.slots import check_slots, chunk_rows
from lmcache_xpu.staging import Chunk, Stager


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """What a connector is created with beside its sizes.

    Args:
        chunk_size: LMCache's tokens per chunk; None where the caller does not know.
        dtype: of LMCache's host memory; None accepts the engine's.
        device: of the engine's KV cache; None accepts any.
        use_mla: the model has one latent plane instead of keys and values.
        layout_hints: `{"kv_layout": name}` as the engine names its memory order.
        opaque_blocks: see `PagedView.from_engine`.
    """

    chunk_size: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    use_mla: bool = False
    layout_hints: Mapping[str, str] | None = None
    opaque_blocks: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Options from keyword arguments.

        Raises:
            SettingsError: a name that is not an option.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise SettingsError(f"connector option {unknown[0]!r}", f"one of {sorted(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What LMCache passes along with a transfer, of all the keywords it may pass.

    Args:
        kvcaches: the engine's layers.
        slot_mapping: `[tokens]`, one slot per token of the whole request.
        cached: leading tokens that the engine has itself; loads leave them alone.
    """

    kvcaches: Sequence[EngineLayer]
    slot_mapping: torch.Tensor
    cached: int

    @classmethod
    def read(cls, given: Mapping[str, Any], kvcaches: Sequence[EngineLayer] | None) -> Self:
        """A request from keyword arguments; `kvcaches` are used where none are given.

        Raises:
            TransferError: a tensor is missing.
        """
        kvcaches = given.get("kvcaches", kvcaches)
        slot_mapping = given.get("slot_mapping")
        if kvcaches is None:
            raise TransferError("no kvcaches", "the engine's KV cache as keyword 'kvcaches'")
        if slot_mapping is None:
            raise TransferError("no slot_mapping", "a slot per token as keyword 'slot_mapping'")
        cached = given.get("vllm_cached_tokens", 0)
        return cls(kvcaches=kvcaches, slot_mapping=slot_mapping, cached=cached)


class VLLMPagedMemXPUConnectorV2(GPUConnectorInterface):  # type: ignore[misc]  # untyped base
    """Copies whole chunks, KV_2LTD `[2, layers, tokens, hidden]` or KV_MLA_FMT.

    Args:
        hidden_dim_size: elements of one token in one plane: heads x head size.
        num_layers: layers of the model.
        use_gpu: accepted for LMCache; staging is decided by where the memory is.
        kwargs: see `ConnectorOptions`.

    Raises:
        SettingsError: an unknown option.
    """

    def __init__(
        self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **kwargs: Any
    ) -> None:
        options = ConnectorOptions.read(kwargs)
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self.use_gpu = use_gpu
        self.use_mla = options.use_mla
        self.kvcaches: Sequence[EngineLayer] | None = None
        self._options = options
        self._geometry = Geometry(
            hidden=hidden_dim_size,
            mla=options.use_mla,
            kv_layout=(options.layout_hints or {}).get("kv_layout"),
        )
        self._format = MemoryFormat.KV_MLA_FMT if options.use_mla else MemoryFormat.KV_2LTD
        self._bound: _Bound | None = None

    @classmethod
    def from_metadata(
        cls,
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | str | None = None,
        *,
        layout_hints: Mapping[str, str] | None = None,
        opaque_blocks: bool = False,
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
        )

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Shape of the host memory of `num_tokens` tokens."""
        return torch.Size(
            [self._geometry.planes, self.num_layers, num_tokens, self.hidden_dim_size]
        )

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Load one chunk; see `batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Store one chunk; see `batched_from_gpu`."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

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
        soon as this returns.

        Args:
            memory_objs: LMCache's memory, one per chunk.
            starts: first token of each chunk.
            ends: token after the last of each chunk.
            kwargs: see `Request`.

        Raises:
            TransferError: arguments that don't fit; nothing was changed.
            LayoutError: a KV cache that can't be read.
        """
        request = Request.read(kwargs, self.kvcaches)
        bound = self._bind(request.kvcaches)
        spans = _spans(memory_objs, starts, ends)
        bound.stager.load(self._chunks(bound.view, spans, request, loading=True))

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Store chunks from the engine's KV cache; complete on the host when this returns.

        Arguments and errors as for `batched_to_gpu`. Tokens with negative slots leave their
        part of the host memory as it is.
        """
        request = Request.read(kwargs, self.kvcaches)
        bound = self._bind(request.kvcaches)
        spans = _spans(memory_objs, starts, ends)
        bound.stager.store(self._chunks(bound.view, spans, request, loading=False))

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Bind to the engine's KV cache, given as `kvcaches`; cheap when it is bound already.

        Raises:
            LayoutError: a KV cache that can't be read.
        """
        if (kvcaches := kwargs.get("kvcaches")) is not None:
            self._bind(kvcaches)

    def _bind(self, kvcaches: Sequence[EngineLayer]) -> _Bound:
        # By address, because the engine may move its KV cache (sleep and wake).
        addresses = tuple(
            tensor.data_ptr()
            for layer in kvcaches
            for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)
        )
        if self._bound is None or self._bound.addresses != addresses:
            view = PagedView.from_engine(
                kvcaches,
                self._geometry,
                num_layers=self.num_layers,
                opaque_blocks=self._options.opaque_blocks,
            )
            self._check_view(view)
            self._bound = _Bound(addresses, view, Stager(view))
            self.kvcaches = kvcaches
        return self._bound

    def _check_view(self, view: PagedView) -> None:
        device, dtype = self._options.device, self._options.dtype
        # The type alone: engines name "xpu" where tensors say "xpu:0".
        if device is not None and torch.device(device).type != view.device.type:
            raise LayoutError(f"a KV cache on {view.device}", f"one on {device}")
        if dtype is not None and not _same_bytes(dtype, view.dtype):
            raise LayoutError(f"a KV cache of {view.dtype}", f"{dtype}, as LMCache's memory")
        chunk = self._options.chunk_size
        if chunk is not None and chunk % view.tokens_per_row:
            raise LayoutError(
                f"chunks of {chunk} tokens on blocks of {view.tokens_per_row}",
                "a multiple of the block size: this engine packs the tokens of a block together",
                f"Set LMCache's chunk_size to a multiple of {view.tokens_per_row}.",
            )

    def _chunks(
        self,
        view: PagedView,
        spans: Sequence[tuple[MemoryObj, int, int]],
        request: Request,
        *,
        loading: bool,
    ) -> list[Chunk]:
        """Everything is checked here, before the first byte moves."""
        slots = check_slots(view, request.slot_mapping)
        chunks = []
        for memory_obj, start, end in spans:
            if end > slots.numel():
                raise SlotError(f"a chunk up to token {end}", f"one of {slots.numel()} slots")
            if self.use_mla and not loading:
                # LMCache's allocators name KV_2LTD by default; what we store is MLA's.
                memory_obj.metadata.fmt = self._format
            host = self._host_memory(view, memory_obj, end - start)
            skip = min(end - start, max(0, request.cached - start)) if loading else 0
            rows = chunk_rows(view, slots[start:end], skip)
            chunks.append(Chunk(rows, host.view(*host.shape[:2], rows.total, view.row_size)))
        return chunks

    def _host_memory(self, view: PagedView, memory_obj: MemoryObj, tokens: int) -> torch.Tensor:
        tensor: torch.Tensor | None = memory_obj.tensor
        given = memory_obj.metadata.fmt
        if tensor is None:
            raise HostMemoryError("a memory object without a tensor", "one that is still valid")
        if given != self._format:
            raise HostMemoryError(f"host memory in format {given}", str(self._format))
        if tensor.shape != self.get_shape(tokens) or not tensor.is_contiguous():
            raise HostMemoryError(
                f"host memory of shape {list(tensor.shape)} and strides {list(tensor.stride())}",
                f"a contiguous {list(self.get_shape(tokens))} for {tokens} tokens",
            )
        if not _same_bytes(tensor.dtype, view.dtype):
            raise HostMemoryError(f"host memory of {tensor.dtype}", f"{view.dtype}")
        if not (is_host(tensor.device) or tensor.device == view.device):
            raise HostMemoryError(f"memory on {tensor.device}", f"cpu or {view.device}")
        return tensor


@dataclass(frozen=True, slots=True)
class _Bound:
    addresses: tuple[int, ...]
    view: PagedView
    stager: Stager


def _spans(
    memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int]
) -> list[tuple[MemoryObj, int, int]]:
    """The chunks with their tokens."""
    if not len(memory_objs) == len(starts) == len(ends):
        raise TransferError(
            f"{len(memory_objs)} memory objects, {len(starts)} starts and {len(ends)} ends",
            "as many of each",
        )
    spans = list(zip(memory_objs, starts, ends, strict=True))
    for _, start, end in spans:
        if not 0 <= start <= end:
            raise TransferError(f"a chunk of tokens {start}:{end}", "0 <= start <= end")
    return spans


def _same_bytes(one: torch.dtype, other: torch.dtype) -> bool:
    # Engines name fp8 either as such or as uint8; its bytes are the same.
    return one == other or one.itemsize == other.itemsize == 1
