"""What both connectors share: how LMCache makes them, and the engine's KV cache.

LMCache calls a connector in the engine's worker, from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.errors import TransferError
from lmcache_xpu.gpu_connector.connector_options import ChunkFormat, ConnectorOptions
from lmcache_xpu.gpu_connector.registered_cache import RegisteredCache, addresses_of
from lmcache_xpu.transfer.paged_view import EngineLayer
from lmcache_xpu.versions.lmcache import GPUConnectorInterface


class PagedMemConnector(GPUConnectorInterface):  # type: ignore[misc]  # untyped base
    """A connector between vLLM's paged KV cache and LMCache's memory objects.

    Args:
        hidden_dim_size: elements of one token in one plane: heads x head size.
        num_layers: layers of the model.
        use_gpu: accepted for LMCache, also as `use_xpu`; where the memory is decides on staging.
        options: fields of `ConnectorOptions`.

    Raises:
        SettingsError: an unknown option.
    """

    FORMAT: MemoryFormat
    LAYERWISE: bool

    def __init__(
        self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **options: Any
    ) -> None:
        self.use_gpu = bool(options.pop("use_xpu", use_gpu))
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self._options = ConnectorOptions.read(options)
        self.use_mla = self._options.use_mla
        layers = 1 if self.LAYERWISE else num_layers
        self._chunk_format = ChunkFormat(hidden_dim_size, layers, self._options, self.FORMAT)
        self._kvcaches: Sequence[EngineLayer] | None = None
        self._cache: RegisteredCache | None = None

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
        """Return the shape of the host memory of `num_tokens` tokens; see `ChunkFormat.shape`."""
        return self._chunk_format.shape(num_tokens)

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Register the engine's KV cache, if it is passed as `kvcaches`; see `registered`."""
        if (kvcaches := kwargs.get("kvcaches")) is not None:
            self.registered(kvcaches)

    def registered(self, kvcaches: Sequence[EngineLayer] | None = None) -> RegisteredCache:
        """Return the engine's KV cache; a new or a moved one is read, and gets staging memory.

        Args:
            kvcaches: see `RegisteredCache`; None means those of the last call.

        Raises:
            TransferError: none was ever passed.
            LayoutError, SettingsError: as of `RegisteredCache`.
        """
        kvcaches = self._kvcaches if kvcaches is None else kvcaches
        if kvcaches is None:
            raise TransferError("no kvcaches", "the engine's KV cache as keyword 'kvcaches'")
        addresses = [at for layer in kvcaches for at in addresses_of(layer)]
        if self._cache is None or self._cache.addresses != addresses:
            self._cache = RegisteredCache(
                kvcaches, self.num_layers, self._options, self._chunk_format
            )
        self._kvcaches = kvcaches
        return self._cache

    def pin(self, pool: torch.Tensor) -> None:
        """Pin LMCache's CPU memory if it is not; errors as of `registered`."""
        self.registered().stager.pin(pool)
