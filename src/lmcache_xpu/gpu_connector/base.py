"""What both connectors share: how LMCache makes them, and every check of a transfer.

LMCache calls a connector in the engine's worker, from one thread. All checks come before the first
byte moves. Negative slots are skipped in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.errors import HostMemoryError, LayoutError, SettingsError, TransferError
from lmcache_xpu.transfer.devices import is_host
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import EngineLayer, PagedView
from lmcache_xpu.transfer.plan import HostFormat, HostMemory, Plan
from lmcache_xpu.transfer.slots import request_rows
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.versions.lmcache import GPUConnectorInterface


class PagedMemConnector(GPUConnectorInterface):  # type: ignore[misc]  # untyped base
    """A connector between vLLM's paged KV cache and LMCache's memory objects.

    Raises SettingsError for an unknown option.
    """

    FORMAT: MemoryFormat  # with keys and values; MLA has its own
    LAYERWISE: bool

    def __init__(
        self,
        hidden_dim_size: int,  # elements of one token in one plane: heads x head size
        num_layers: int,
        use_gpu: bool = False,  # as the next for LMCache; where the memory is decides on staging
        *,
        use_xpu: bool = False,
        chunk_size: int | None = None,  # LMCache's tokens; None where the caller does not know
        dtype: torch.dtype | None = None,  # of LMCache's host memory; None accepts the engine's
        device: torch.device | str | None = None,  # of the engine's KV cache; None accepts any
        use_mla: bool = False,  # one latent plane instead of keys and values
        layout_hints: Mapping[str, str] | None = None,  # {"kv_layout": the engine's memory order}
        opaque_blocks: bool = False,  # see `PagedView.from_engine`
        staging_bytes: int | None = None,  # see `Stager`
        # Of a standard connector: host memory of the shape of LMCache's format, `[planes, layers,
        # ...]`, has the bytes of `[layers, planes, ...]`, so that a chunk's layer is one segment.
        layer_major: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown:
            options = sorted(PagedMemConnector.__init__.__kwdefaults__ or ())
            raise SettingsError(f"connector option {min(unknown)!r}", f"one of {options}")
        self.use_gpu = use_gpu or use_xpu
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self.use_mla = use_mla
        self.geometry = Geometry(
            hidden=hidden_dim_size, mla=use_mla, kv_layout=(layout_hints or {}).get("kv_layout")
        )
        # Opaque blocks lie in host memory of the same size as wholes, not in planes.
        planes = 1 if opaque_blocks else self.geometry.planes
        self.host_format = (
            HostFormat(1, planes, "rows")
            if self.LAYERWISE
            else HostFormat(num_layers, planes, "layers" if layer_major else "planes")
        )
        self._format = MemoryFormat.KV_MLA_FMT if use_mla else self.FORMAT
        self._chunk_size, self._dtype, self._device = chunk_size, dtype, device
        self._opaque_blocks = opaque_blocks
        self._staging_bytes = staging_bytes
        self._kvcaches: Sequence[EngineLayer] | None = None
        self._addresses: list[int] = []  # of the tensors that the stager moves
        self._stager: Stager | None = None

    @classmethod
    def from_metadata(
        cls,
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Return a connector for an engine as LMCache describes it; arguments as for the class."""
        layers, _, chunk_size, heads, head_size = metadata.kv_shape
        return cls(
            heads * head_size,
            layers,
            use_gpu,
            chunk_size=chunk_size,
            dtype=metadata.kv_dtype,
            device=device,
            use_mla=metadata.use_mla,
            **options,
        )

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of one memory object of some tokens.

        `[planes, layers, tokens, hidden]`; layerwise `[tokens, planes, hidden]`, MLA's `[tokens,
        hidden]`.
        """
        planes, hidden = self.geometry.planes, self.hidden_dim_size
        if not self.LAYERWISE:
            return torch.Size([planes, self.num_layers, num_tokens, hidden])
        return torch.Size([num_tokens, hidden] if planes == 1 else [num_tokens, planes, hidden])

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Register the engine's KV cache, if it is passed; see `registered`."""
        if (kvcaches := kwargs.get("kvcaches")) is not None:
            self.registered(kvcaches)

    def registered(self, kvcaches: Sequence[EngineLayer] | None = None) -> Stager:
        """Return what moves the engine's KV cache; a new or a moved one gets staging memory.

        `kvcaches` are one tensor, or a group of tensors, for each layer; None means the last ones.

        Raises:
            TransferError: none was ever passed.
            LayoutError: it can't be read, or is not what the connector was made for.
            SettingsError: no memory for staging.
        """
        kvcaches = self._kvcaches if kvcaches is None else kvcaches
        if kvcaches is None:
            raise TransferError("no kvcaches", "the engine's KV cache as keyword 'kvcaches'")
        addresses = [
            tensor.data_ptr()
            for layer in kvcaches
            for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)
        ]
        if self._stager is None or self._addresses != addresses:
            view = PagedView.from_engine(
                kvcaches,
                self.geometry,
                num_layers=self.num_layers,
                opaque_blocks=self._opaque_blocks,
            )
            self._check_view(view)
            with torch.inference_mode(False):  # what is kept may be written from either mode
                self._stager = Stager(view, self._staging_bytes)
            self._addresses = addresses
        self._kvcaches = kvcaches
        return self._stager

    def _check_view(self, view: PagedView) -> None:
        device, dtype, chunk = self._device, self._dtype, self._chunk_size
        # The type alone: engines name "xpu" where tensors say "xpu:0".
        if device is not None and torch.device(device).type != view.device.type:
            raise LayoutError(f"a KV cache on {view.device}", f"one on {device}")
        if dtype is not None and not _same_bytes(dtype, view.dtype):
            raise LayoutError(f"a KV cache of {view.dtype}", f"{dtype}, as LMCache's memory")
        if chunk is not None and chunk % view.tokens_per_row:
            raise LayoutError(
                f"chunks of {chunk} tokens on blocks of {view.tokens_per_row}",
                "a multiple of the block size: this engine packs the tokens of a block together",
                f"Set LMCache's chunk_size to a multiple of {view.tokens_per_row}.",
            )

    def pin(self, pool: torch.Tensor) -> None:
        """Pin LMCache's CPU memory if it is not; errors as of `registered`."""
        self.registered().pin(pool)

    def plan(
        self, starts: Sequence[int], ends: Sequence[int], call: Mapping[str, Any], *, loading: bool
    ) -> tuple[Stager, Plan]:
        """Plan where each chunk's tokens go; return it with what moves them.

        Args:
            starts, ends: first token of each chunk in the request, and the one after its last.
            call: LMCache's keyword arguments: `slot_mapping`, `[tokens]`, one slot per token of the
                whole request; perhaps `kvcaches`, see `registered`; perhaps `vllm_cached_tokens`,
                so many leading tokens a load leaves alone: others may share their blocks.
            loading: whether the chunks are loaded.

        Raises:
            TransferError: spans that don't fit each other or the slot mapping, bad slots.
            LayoutError: a KV cache that can't be read.
        """
        stager = self.registered(call.get("kvcaches"))
        if (slots := call.get("slot_mapping")) is None:
            raise TransferError("no slot_mapping", "a slot per token as keyword 'slot_mapping'")
        if len(starts) != len(ends):
            raise TransferError(f"{len(starts)} starts and {len(ends)} ends", "as many of each")
        cached = call.get("vllm_cached_tokens", 0) if loading else 0
        rows = request_rows(stager.view, slots, list(zip(starts, ends, strict=True)), cached)
        return stager, stager.plan(self.host_format, rows)

    def memory(
        self,
        stager: Stager,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        loading: bool,
    ) -> HostMemory:
        """Return the memory of LMCache's objects: bytes, flat.

        Raises:
            HostMemoryError: one that does not fit its chunk, or is gone, strided or elsewhere.
            TransferError: not one per chunk.
        """
        if not len(memory_objs) == len(starts) == len(ends):
            raise TransferError(
                f"{len(memory_objs)} memory objects, {len(starts)} starts and {len(ends)} ends",
                "as many of each",
            )
        memory, checked, size = HostMemory(), None, 0  # nearly all chunks are alike
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            metadata = memory_obj.metadata
            if not memory_obj.is_valid():
                raise HostMemoryError("a memory object that was given back", "one that is valid")
            if self.use_mla and not loading:
                # LMCache's allocators name their default format; what we store is MLA's.
                metadata.fmt = self._format
            kind = (end - start, metadata.fmt, metadata.shape, metadata.dtype)
            if kind != checked:
                size, checked = self._object_bytes(*kind, stager.view.dtype), kind
            # Not `tensor`, which makes three views of it, for each of hundreds of chunks.
            raw: torch.Tensor | None = memory_obj.raw_tensor
            if raw is None or not raw.is_contiguous():
                raise HostMemoryError("memory that is gone or strided", "valid and contiguous")
            if raw.nbytes < size:  # LMCache may give an object more than its shape needs
                raise HostMemoryError(f"memory of {raw.nbytes} bytes", f"{size}")
            if raw.dim() != 1 or raw.dtype != torch.uint8:
                raw = raw.view(-1).view(torch.uint8)
            memory.append(raw)
        for elsewhere in memory.devices - {stager.device}:
            if not is_host(elsewhere):
                raise HostMemoryError(f"memory on {elsewhere}", f"cpu or {stager.device}")
        return memory

    def _object_bytes(
        self,
        tokens: int,
        name: MemoryFormat,
        shape: torch.Size,
        dtype: torch.dtype | None,
        engine_dtype: torch.dtype,
    ) -> int:
        """Return the bytes that a memory object of some tokens needs; errors as of `memory`."""
        if name != self._format:
            raise HostMemoryError(f"host memory in format {name}", str(self._format))
        if shape != (expected := self.get_shape(tokens)):
            raise HostMemoryError(
                f"host memory of shape {list(shape)}", f"{list(expected)} for {tokens} tokens"
            )
        if dtype is None or not _same_bytes(dtype, engine_dtype):
            raise HostMemoryError(f"host memory of {dtype}", f"{engine_dtype}")
        return shape.numel() * dtype.itemsize


def _same_bytes(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether values of both dtypes are the same bytes: engines name fp8 as such or as uint8."""
    return dtype == other or dtype.itemsize == other.itemsize == 1
