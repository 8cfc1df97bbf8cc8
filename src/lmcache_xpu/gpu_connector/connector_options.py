"""What a GPU connector is made with, and the host memory of a chunk that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

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
        layer_major: of a standard connector: host memory has the shape that LMCache's format
            says, `[planes, layers, ...]`, and in it the bytes of `[layers, planes, ...]`.
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
    def from_lmcache(
        cls,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        *,
        device: torch.device | str,
        layout_hints: Mapping[str, str] | None,
        opaque_blocks: bool,
    ) -> Self:
        """Return the options of a connector that LMCache uses in an engine.

        `kv_shape` of the metadata has the engine's real heads and head size.
        """
        staging_mib = config.get_extra_config_value("xpu.staging_mib", None)
        return cls(
            chunk_size=metadata.kv_shape[2],
            dtype=metadata.kv_dtype,
            device=device,
            use_mla=metadata.use_mla,
            layout_hints=layout_hints,
            opaque_blocks=opaque_blocks,
            staging_bytes=None if staging_mib is None else int(staging_mib) * 2**20,
            layer_major=True,
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFormat:
    """The format of LMCache's memory objects.

    Args:
        lmcache_name: LMCache's name of the format.
        geometry: sizes of a token.
        host: of each of a chunk's memory objects.
    """

    lmcache_name: MemoryFormat
    geometry: Geometry
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
            layerwise: a memory object holds one layer, rows first.
        """
        geometry = Geometry(
            hidden=hidden,
            mla=options.use_mla,
            kv_layout=(options.layout_hints or {}).get("kv_layout"),
        )
        # Opaque blocks lie in host memory of the same size as wholes, not in planes.
        planes = 1 if options.opaque_blocks else geometry.planes
        order: Order = "rows" if layerwise else "layers" if options.layer_major else "planes"
        return cls(
            lmcache_name=MemoryFormat.KV_MLA_FMT if options.use_mla else lmcache_name,
            geometry=geometry,
            host=HostFormat(1 if layerwise else num_layers, planes, order),
        )

    def shape(self, tokens: int) -> torch.Size:
        """Return the shape of one memory object of some tokens.

        `[planes, layers, tokens, hidden]`, or layerwise `[tokens, planes, hidden]`, without the
        planes where there is one.
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
