"""What both connectors share: LMCache's keywords, the engine's KV cache, and every check."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.errors import (
    HostMemoryError,
    LayoutError,
    SettingsError,
    TransferError,
)
from lmcache_xpu.gpu_connector.chunk_bytes import HostChunks
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import EngineLayer, PagedView
from lmcache_xpu.transfer.plan import HostFormat, Order, Plan, layer_groups
from lmcache_xpu.transfer.slots import check_slots
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.staging_ring import STAGING_BYTES


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
        staging_bytes: see `Stager`.
        layers_at_once: most layers in one memory object of a layerwise connector.
        layer_major: of a standard connector: host memory has the shape that LMCache's format
            says, `[planes, layers, ...]`, and in it the bytes of `[layers, planes, ...]`.
    """

    chunk_size: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    use_mla: bool = False
    layout_hints: Mapping[str, str] | None = None
    opaque_blocks: bool = False
    staging_bytes: int = STAGING_BYTES
    layers_at_once: int = 1
    layer_major: bool = False

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
        kvcaches: the engine's layers; None means those of the last request.
        slot_mapping: `[tokens]`, one slot per token of the whole request.
        cached: leading tokens that the engine has itself; loads leave them alone.
    """

    kvcaches: Sequence[EngineLayer] | None
    slot_mapping: torch.Tensor
    cached: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """A request from keyword arguments.

        Raises:
            TransferError: no slot mapping.
        """
        slot_mapping = given.get("slot_mapping")
        if slot_mapping is None:
            raise TransferError("no slot_mapping", "a slot per token as keyword 'slot_mapping'")
        cached = given.get("vllm_cached_tokens", 0)
        return cls(kvcaches=given.get("kvcaches"), slot_mapping=slot_mapping, cached=cached)

    def slots(self, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        """Those from the first chunk to the last, on the host."""
        return self.slot_mapping[min(starts, default=0) : max(ends, default=0)].to("cpu")


@dataclass(frozen=True, slots=True)
class Bound:
    """The engine's KV cache, ready to be stored and loaded."""

    addresses: tuple[int, ...]
    view: PagedView
    stager: Stager


class Binding:
    """A connector's hold on the engine's KV cache.

    Args:
        hidden: elements of one token in one plane.
        num_layers: layers of the model.
        options: see there.
        fmt: LMCache's name of the host format; MLA has its own.
        layerwise: host memory holds a group of layers, rows first.
    """

    def __init__(
        self,
        hidden: int,
        num_layers: int,
        options: ConnectorOptions,
        fmt: MemoryFormat,
        *,
        layerwise: bool,
    ) -> None:
        self.options = options
        self.num_layers = num_layers
        self.kvcaches: Sequence[EngineLayer] | None = None
        self._geometry = Geometry(
            hidden=hidden,
            mla=options.use_mla,
            kv_layout=(options.layout_hints or {}).get("kv_layout"),
        )
        self._fmt = MemoryFormat.KV_MLA_FMT if options.use_mla else fmt
        # Opaque blocks lie in host memory of the same size as wholes, not in planes.
        planes = 1 if options.opaque_blocks else self._geometry.planes
        # Per memory object, its layers. One format for all: the last may have layers to spare.
        most = options.layers_at_once if layerwise else num_layers
        self.groups = layer_groups(num_layers, most)
        order: Order = "rows" if layerwise else "layers" if options.layer_major else "planes"
        self._form = HostFormat(self.groups[0][1], planes, order)
        self._bound: Bound | None = None

    def host_shape(self, tokens: int) -> torch.Size:
        """Shape of the host memory of some tokens."""
        planes, hidden = self._geometry.planes, self._geometry.hidden
        if self._form.order != "rows":
            return torch.Size([planes, self._form.layers, tokens, hidden])
        rows = self._form.layers * tokens
        return torch.Size([rows, hidden] if planes == 1 else [rows, planes, hidden])

    def bind(self, kvcaches: Sequence[EngineLayer] | None) -> Bound:
        """The engine's KV cache; read anew when the engine has moved it.

        Raises:
            TransferError: none was ever given.
            LayoutError: it can't be read, or is not what this connector was made for.
        """
        kvcaches = self.kvcaches if kvcaches is None else kvcaches
        if kvcaches is None:
            raise TransferError("no kvcaches", "the engine's KV cache as keyword 'kvcaches'")
        if self._bound is not None and self._is_bound(self._bound, kvcaches):
            return self._bound
        addresses = tuple(address for layer in kvcaches for address in _addresses(layer))
        if self._bound is None or self._bound.addresses != addresses:
            view = PagedView.from_engine(
                kvcaches,
                self._geometry,
                num_layers=self.num_layers,
                opaque_blocks=self.options.opaque_blocks,
            )
            self._check_view(view)
            with torch.inference_mode(False):  # what is kept may be written from either mode
                stager = Stager(view, self.options.staging_bytes)
            self._bound = Bound(addresses, view, stager)
        self.kvcaches = kvcaches
        return self._bound

    def _is_bound(self, bound: Bound, kvcaches: Sequence[EngineLayer]) -> bool:
        """Whether these are the same tensors at the same place, judged by the first address.

        An engine that moves its KV cache (sleep and wake) moves all of it.
        """
        known = self.kvcaches
        return (
            known is not None
            and 0 < len(known) == len(kvcaches)
            and all(map(operator.is_, known, kvcaches))
            and _addresses(kvcaches[0])[0] == bound.addresses[0]
        )

    def plan(
        self,
        bound: Bound,
        starts: Sequence[int],
        ends: Sequence[int],
        request: Request,
        *,
        loading: bool,
        cuts: Sequence[int] = (0,),
    ) -> Plan:
        """Where each chunk's tokens go; tokens that the engine has are left out of a load.

        See `Plan` for the cuts.

        Raises:
            TransferError: spans that don't fit each other or the slot mapping, bad slots.
        """
        if len(starts) != len(ends):
            raise TransferError(f"{len(starts)} starts and {len(ends)} ends", "as many of each")
        slots = check_slots(bound.view, request.slot_mapping)
        spans = list(zip(starts, ends, strict=True))
        cached = request.cached if loading else 0
        return bound.stager.plan(self._form, slots, spans, cached, cuts)

    def memory(
        self,
        bound: Bound,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        loading: bool,
    ) -> HostChunks:
        """The memory of LMCache's objects; checks what is said of them, and looks at none.

        Raises:
            HostMemoryError: one that does not fit its chunk.
            TransferError: not one per chunk.
        """
        if not len(memory_objs) == len(starts) == len(ends):
            raise TransferError(
                f"{len(memory_objs)} memory objects, {len(starts)} starts and {len(ends)} ends",
                "as many of each",
            )
        known, size, sizes = None, 0, []  # what was found good; nearly all chunks are alike
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            facts = memory_obj.metadata
            if not memory_obj.is_valid():
                raise HostMemoryError("a memory object that was given back", "one that is valid")
            if self.options.use_mla and not loading:
                # LMCache's allocators name their default format; what we store is MLA's.
                facts.fmt = self._fmt
            found = (end - start, facts.fmt, facts.shape, facts.dtype)
            if found != known:
                size = self._size_of(bound, *found)
                known = found
            sizes.append(size)
        return HostChunks(memory_objs, sizes, bound.view.device)

    def _size_of(
        self,
        bound: Bound,
        tokens: int,
        fmt: MemoryFormat,
        shape: torch.Size,
        dtype: torch.dtype | None,
    ) -> int:
        if fmt != self._fmt:
            raise HostMemoryError(f"host memory in format {fmt}", str(self._fmt))
        if shape != (wanted := self.host_shape(tokens)):
            raise HostMemoryError(
                f"host memory of shape {list(shape)}", f"{list(wanted)} for {tokens} tokens"
            )
        if dtype is None or not _same_bytes(dtype, bound.view.dtype):
            raise HostMemoryError(f"host memory of {dtype}", f"{bound.view.dtype}")
        return shape.numel() * dtype.itemsize

    def _check_view(self, view: PagedView) -> None:
        device, dtype, chunk = self.options.device, self.options.dtype, self.options.chunk_size
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


def _addresses(layer: EngineLayer) -> list[int]:
    tensors = [layer] if isinstance(layer, torch.Tensor) else layer
    return [tensor.data_ptr() for tensor in tensors]


def _same_bytes(one: torch.dtype, other: torch.dtype) -> bool:
    # Engines name fp8 either as such or as uint8; its bytes are the same.
    return one == other or one.itemsize == other.itemsize == 1
