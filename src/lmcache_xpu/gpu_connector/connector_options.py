"""What a GPU connector is made with, and the host memory of a chunk that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from lmcache.v1.memory_management import MemoryFormat

from lmcache_xpu.errors import HostMemoryError, SettingsError
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.plan import HostFormat, Order


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
        layer_major: of a standard connector: host memory has the shape of LMCache's format,
            `[planes, layers, ...]`, and in it the bytes of `[layers, planes, ...]`, so that a layer
            of a chunk is one segment. A remote serde, which would look into a chunk, is refused.
    """

    chunk_size: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    use_mla: bool = False
    layout_hints: Mapping[str, str] | None = None
    opaque_blocks: bool = False
    staging_bytes: int | None = None
    layer_major: bool = False

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options that keyword arguments name.

        Raises:
            SettingsError: a name that is not an option.
        """
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(arguments) - names):
            raise SettingsError(f"connector option {unknown[0]!r}", f"one of {sorted(names)}")
        return cls(**arguments)


class ChunkFormat:
    """The format of LMCache's memory objects.

    Args:
        hidden: elements of one token in one plane.
        layers: of one memory object.
        options: of the connector.
        name: LMCache's name of the format with keys and values; MLA has its own.

    Attributes:
        geometry: sizes of a token.
        host: how a memory object lies in host memory.
    """

    def __init__(
        self, hidden: int, layers: int, options: ConnectorOptions, name: MemoryFormat
    ) -> None:
        kv_layout = (options.layout_hints or {}).get("kv_layout")
        self.geometry = Geometry(hidden=hidden, mla=options.use_mla, kv_layout=kv_layout)
        # Opaque blocks lie in host memory of the same size as wholes, not in planes.
        planes = 1 if options.opaque_blocks else self.geometry.planes
        order: Order = "layers" if options.layer_major else "planes"
        self.host = HostFormat(layers, planes, "rows" if name is MemoryFormat.KV_T2D else order)
        self.name = MemoryFormat.KV_MLA_FMT if options.use_mla else name

    def shape(self, tokens: int) -> torch.Size:
        """Return the shape of one memory object of some tokens.

        `[planes, layers, tokens, hidden]`; layerwise `[tokens, planes, hidden]`, MLA's without
        planes.
        """
        planes, hidden = self.geometry.planes, self.geometry.hidden
        if self.host.order != "rows":
            return torch.Size([planes, self.host.layers, tokens, hidden])
        return torch.Size([tokens, hidden] if planes == 1 else [tokens, planes, hidden])

    def object_bytes(
        self,
        tokens: int,
        name: MemoryFormat,
        shape: torch.Size,
        dtype: torch.dtype | None,
        engine_dtype: torch.dtype,
    ) -> int:
        """Return the bytes that a memory object of some tokens needs.

        Raises:
            HostMemoryError: an object of another format, shape or dtype.
        """
        if name != self.name:
            raise HostMemoryError(f"host memory in format {name}", str(self.name))
        if shape != (expected := self.shape(tokens)):
            raise HostMemoryError(
                f"host memory of shape {list(shape)}", f"{list(expected)} for {tokens} tokens"
            )
        if dtype is None or not same_bytes(dtype, engine_dtype):
            raise HostMemoryError(f"host memory of {dtype}", f"{engine_dtype}")
        return shape.numel() * dtype.itemsize


def same_bytes(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether values of both dtypes are the same bytes: engines name fp8 as such or as uint8."""
    return dtype == other or dtype.itemsize == other.itemsize == 1
