"""What both connectors share: how LMCache makes them, and the engine's KV cache.

LMCache calls a connector in the engine's worker, from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.gpu_connector.connector_options import ChunkFormat, ConnectorOptions
from lmcache_xpu.gpu_connector.registered_cache import RegisteredCache, Registration
from lmcache_xpu.metrics import Flow
from lmcache_xpu.versions.lmcache import GPUConnectorInterface


class PagedMemConnector(GPUConnectorInterface):  # type: ignore[misc]  # untyped base
    """A connector between vLLM's paged KV cache and LMCache's memory objects.

    Args:
        hidden_dim_size: elements of one token in one plane: heads x head size.
        num_layers: layers of the model.
        use_gpu: accepted for LMCache; staging is decided by where the memory is.
        options: how to move, or else
        kwargs: fields of `ConnectorOptions`; `use_xpu` is another name for `use_gpu`.

    Attributes:
        failed_slots: for each load that ended early, the slots `[tokens]` that it left unfilled.

    Raises:
        SettingsError: an unknown option, or options in both ways.
    """

    FORMAT: MemoryFormat
    LAYERWISE: bool

    def __init__(
        self,
        hidden_dim_size: int,
        num_layers: int,
        use_gpu: bool = False,
        *,
        options: ConnectorOptions | None = None,
        **kwargs: Any,
    ) -> None:
        self.use_gpu = bool(kwargs.pop("use_xpu", use_gpu))
        if options is None:
            options = ConnectorOptions.read(kwargs)
        elif kwargs:
            raise SettingsError(
                f"connector options and {sorted(kwargs)[0]!r} beside them",
                "`options`, or its fields as keyword arguments",
            )
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self.use_mla = options.use_mla
        self.failed_slots: list[torch.Tensor] = []
        self._chunk_format = ChunkFormat.of_connector(
            hidden_dim_size, num_layers, options, self.FORMAT, layerwise=self.LAYERWISE
        )
        self._registration = Registration(num_layers, options, self._chunk_format)

    @classmethod
    def from_metadata(
        cls,
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | str | None = None,
        **kwargs: Any,
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
            **kwargs,
        )

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of the host memory of `num_tokens` tokens; see `ChunkFormat.shape`."""
        return self._chunk_format.shape(num_tokens)

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Register the engine's KV cache, given as `kvcaches`, and allocate staging memory.

        Cheap when it is registered already.

        Raises:
            LayoutError: a KV cache that can't be read.
            SettingsError: no memory for staging.
        """
        if (kvcaches := kwargs.get("kvcaches")) is not None:
            self._registration.register(kvcaches)

    def pin(self, pool: torch.Tensor) -> None:
        """Pin LMCache's memory now, when nobody waits, where the device does not reach it yet.

        Args:
            pool: all of LMCache's CPU memory.

        Raises:
            TransferError: no KV cache is registered.
        """
        self._registration.register(None).stager.pin(pool)

    def _layer_bytes(self, cache: RegisteredCache, tokens: int) -> int:
        elements = self.get_shape(1).numel() // self._chunk_format.host.layers
        return tokens * elements * cache.view.dtype.itemsize

    def _count(
        self,
        flow: Flow,
        cache: RegisteredCache,
        starts: Sequence[int],
        ends: Sequence[int],
        cached: int,
        seconds: float,
    ) -> None:
        """Count a transfer of these chunks, without the request's first `cached` tokens."""
        spans = zip(starts, ends, strict=True)
        tokens = sum(end - max(start, min(end, cached)) for start, end in spans)
        size = self.num_layers * self._layer_bytes(cache, tokens)
        flow.moved(seconds, size_bytes=size, tokens=tokens)
