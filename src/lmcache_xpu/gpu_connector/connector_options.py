"""What a GPU connector is made with, beside the sizes of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer.plan import layers_of


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
    staging_bytes: int | None = None
    layers_at_once: int = 1
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

        How bytes move is what the settings say, or else what suits the size of a chunk.

        Args:
            config: LMCache's; `xpu.layers_at_once` and `xpu.staging_mib` are ours.
            metadata: LMCache's, with the engine's real heads and head size in `kv_shape`.
            device: see the class, as the next two.
            layout_hints: of the engine.
            opaque_blocks: of the engine.
        """
        _, *layer_shape = metadata.kv_shape
        layers = config.get_extra_config_value("xpu.layers_at_once", None)
        if layers is None:
            layer_bytes = math.prod(layer_shape) * metadata.kv_dtype.itemsize
            layers = layers_of(layer_bytes, torch.device(device).type)
        staging_mib = config.get_extra_config_value("xpu.staging_mib", None)
        return cls(
            chunk_size=metadata.kv_shape[2],
            dtype=metadata.kv_dtype,
            device=device,
            use_mla=metadata.use_mla,
            layout_hints=layout_hints,
            opaque_blocks=opaque_blocks,
            staging_bytes=None if staging_mib is None else int(staging_mib) * 2**20,
            layers_at_once=int(layers),
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
