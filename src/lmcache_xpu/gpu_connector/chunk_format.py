"""The host memory of a chunk, as LMCache and the transfers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from lmcache.v1.memory_management import MemoryFormat

from lmcache_xpu.errors import HostMemoryError
from lmcache_xpu.gpu_connector.connector_options import ConnectorOptions
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.plan import HostFormat, Order, layer_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFormat:
    """The format of LMCache's memory objects.

    Args:
        lmcache_name: LMCache's name of the format.
        geometry: sizes of a token.
        groups: for each memory object of a chunk its first layer, and the one after its last.
        host: one format for all objects of a chunk; the last may have layers to spare.
    """

    lmcache_name: MemoryFormat
    geometry: Geometry
    groups: Sequence[tuple[int, int]]
    host: HostFormat

    @classmethod
    def of_connector(
        cls,
        hidden: int,
        num_layers: int,
        options: ConnectorOptions,
        lmcache_name: MemoryFormat,
        *,
        layerwise: bool,
    ) -> Self:
        """Return the format of a connector's chunks.

        Args:
            hidden: elements of one token in one plane.
            num_layers: layers of the model.
            options: of the connector.
            lmcache_name: the format's name with keys and values; MLA has its own.
            layerwise: host memory holds a group of layers, rows first.
        """
        geometry = Geometry(
            hidden=hidden,
            mla=options.use_mla,
            kv_layout=(options.layout_hints or {}).get("kv_layout"),
        )
        # Opaque blocks lie in host memory of the same size as wholes, not in planes.
        planes = 1 if options.opaque_blocks else geometry.planes
        groups = layer_groups(num_layers, options.layers_at_once if layerwise else num_layers)
        order: Order = "rows" if layerwise else "layers" if options.layer_major else "planes"
        return cls(
            lmcache_name=MemoryFormat.KV_MLA_FMT if options.use_mla else lmcache_name,
            geometry=geometry,
            groups=groups,
            host=HostFormat(groups[0][1], planes, order),
        )

    def shape(self, tokens: int) -> torch.Size:
        """Return the shape of one memory object of some tokens.

        `[planes, layers, tokens, hidden]`, or layerwise `[layers * tokens, planes, hidden]`,
        without the planes where there is one.
        """
        planes, hidden = self.geometry.planes, self.geometry.hidden
        if self.host.order != "rows":
            return torch.Size([planes, self.host.layers, tokens, hidden])
        rows = self.host.layers * tokens
        return torch.Size([rows, hidden] if planes == 1 else [rows, planes, hidden])

    def object_bytes(
        self,
        tokens: int,
        name: MemoryFormat,
        shape: torch.Size,
        dtype: torch.dtype | None,
        engine_dtype: torch.dtype,
    ) -> int:
        """Return the bytes that a memory object of some tokens needs.

        Args:
            tokens: number of tokens in the object.
            name: format of the object.
            shape: of the object.
            dtype: of the object.
            engine_dtype: dtype of the engine's KV cache.

        Raises:
            HostMemoryError: an object of another format, shape or dtype.
        """
        if name != self.lmcache_name:
            raise HostMemoryError(f"host memory in format {name}", str(self.lmcache_name))
        if shape != (expected := self.shape(tokens)):
            raise HostMemoryError(
                f"host memory of shape {list(shape)}", f"{list(expected)} for {tokens} tokens"
            )
        if dtype is None or not same_bytes(dtype, engine_dtype):
            raise HostMemoryError(f"host memory of {dtype}", f"{engine_dtype}")
        return shape.numel() * dtype.itemsize


def same_bytes(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether values of both dtypes are the same bytes.

    Engines name fp8 either as such or as uint8.
    """
    return dtype == other or dtype.itemsize == other.itemsize == 1
