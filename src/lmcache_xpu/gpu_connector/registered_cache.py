"""The engine's KV cache as it is registered with a connector, and every check of a transfer.

All checks come before the first byte moves. The KV cache is registered once, and again if the
engine moves it (sleep and wake). A load skips the tokens that vLLM's own prefix cache has
(`vllm_cached_tokens`), because other requests may share their blocks. Negative slots are skipped in
both directions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.errors import HostMemoryError, LayoutError, TransferError
from lmcache_xpu.gpu_connector.connector_options import (
    ChunkFormat,
    ConnectorOptions,
    same_bytes,
)
from lmcache_xpu.transfer.devices import is_host
from lmcache_xpu.transfer.host_memory import HostMemory
from lmcache_xpu.transfer.paged_view import EngineLayer, PagedView
from lmcache_xpu.transfer.plan import Plan
from lmcache_xpu.transfer.slots import check_slots
from lmcache_xpu.transfer.staging import Stager


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """What LMCache passes along with a transfer, out of all the keywords that it may pass.

    Args:
        kvcaches: the engine's layers; None means those of the last transfer.
        slot_mapping: `[tokens]`, one slot per token of the whole request.
        cached: leading tokens that the engine has itself; loads leave them alone.
    """

    kvcaches: Sequence[EngineLayer] | None
    slot_mapping: torch.Tensor
    cached: int

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Self:
        """Return what keyword arguments say of a transfer.

        Raises:
            TransferError: no slot mapping.
        """
        slot_mapping = arguments.get("slot_mapping")
        if slot_mapping is None:
            raise TransferError("no slot_mapping", "a slot per token as keyword 'slot_mapping'")
        return cls(
            kvcaches=arguments.get("kvcaches"),
            slot_mapping=slot_mapping,
            cached=arguments.get("vllm_cached_tokens", 0),
        )


@dataclass(frozen=True, slots=True)
class RegisteredCache:
    """The engine's KV cache at one place in memory, ready to be stored and loaded.

    Args:
        addresses: of all its tensors.
        view: the cache, whatever its layout.
        stager: moves its bytes.
        chunk_format: of the host memory that it is moved to and from.
    """

    addresses: tuple[int, ...]
    view: PagedView
    stager: Stager
    chunk_format: ChunkFormat

    def plan(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        request: TransferRequest,
        *,
        loading: bool,
    ) -> Plan:
        """Plan where each chunk's tokens go; a load leaves out tokens that the engine has.

        Raises:
            TransferError: spans that don't fit each other or the slot mapping, bad slots.
        """
        if len(starts) != len(ends):
            raise TransferError(f"{len(starts)} starts and {len(ends)} ends", "as many of each")
        slots = check_slots(self.view, request.slot_mapping)
        spans = list(zip(starts, ends, strict=True))
        cached = request.cached if loading else 0
        return self.stager.plan(self.chunk_format.host, slots, spans, cached)

    def memory(
        self,
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
            if self.chunk_format.geometry.mla and not loading:
                # LMCache's allocators name their default format; what we store is MLA's.
                metadata.fmt = self.chunk_format.lmcache_name
            kind = (end - start, metadata.fmt, metadata.shape, metadata.dtype)
            if kind != checked:
                size = self.chunk_format.object_bytes(*kind, self.view.dtype)
                checked = kind
            # Not `tensor`, which makes three views of it: hundreds of chunks wait for this.
            raw: torch.Tensor | None = memory_obj.raw_tensor
            if raw is None or not raw.is_contiguous():
                raise HostMemoryError("memory that is gone or strided", "valid and contiguous")
            if raw.nbytes < size:  # LMCache may give an object more than its shape needs
                raise HostMemoryError(f"memory of {raw.nbytes} bytes", f"{size}")
            if raw.dim() != 1 or raw.dtype != torch.uint8:
                raw = raw.view(-1).view(torch.uint8)
            memory.append(raw)
        for elsewhere in memory.devices - {self.view.device}:
            if not is_host(elsewhere):
                raise HostMemoryError(f"memory on {elsewhere}", f"cpu or {self.view.device}")
        return memory


class Registration:
    """What a connector takes for the engine's KV cache, and the one that it has."""

    def __init__(
        self, num_layers: int, options: ConnectorOptions, chunk_format: ChunkFormat
    ) -> None:
        self._num_layers = num_layers
        self._options = options
        self._chunk_format = chunk_format
        self._kvcaches: Sequence[EngineLayer] | None = None
        self._cache: RegisteredCache | None = None

    def register(self, kvcaches: Sequence[EngineLayer] | None) -> RegisteredCache:
        """Return the engine's KV cache; a new or a moved one is read, and gets staging memory.

        Args:
            kvcaches: one tensor, or a group of tensors, for each layer; None means those of the
                last call.

        Raises:
            TransferError: none was ever passed.
            LayoutError: it can't be read, or is not what this connector was made for.
            SettingsError: no memory for staging.
        """
        kvcaches = self._kvcaches if kvcaches is None else kvcaches
        if kvcaches is None:
            raise TransferError("no kvcaches", "the engine's KV cache as keyword 'kvcaches'")
        if self._cache is not None and self._is_registered(self._cache, kvcaches):
            return self._cache
        addresses = tuple(address for layer in kvcaches for address in _addresses(layer))
        if self._cache is None or self._cache.addresses != addresses:
            view = PagedView.from_engine(
                kvcaches,
                self._chunk_format.geometry,
                num_layers=self._num_layers,
                opaque_blocks=self._options.opaque_blocks,
            )
            self._check_view(view)
            with torch.inference_mode(False):  # what is kept may be written from either mode
                stager = Stager(view, self._options.staging_bytes)
            self._cache = RegisteredCache(addresses, view, stager, self._chunk_format)
        self._kvcaches = kvcaches
        return self._cache

    def _is_registered(self, cache: RegisteredCache, kvcaches: Sequence[EngineLayer]) -> bool:
        """Whether these are the same tensors at the same place, judged by the first address.

        An engine that moves its KV cache (sleep and wake) moves all of it.
        """
        last = self._kvcaches
        return (
            last is not None
            and 0 < len(last) == len(kvcaches)
            and all(map(operator.is_, last, kvcaches))
            and _addresses(kvcaches[0])[0] == cache.addresses[0]
        )

    def _check_view(self, view: PagedView) -> None:
        device, dtype, chunk = self._options.device, self._options.dtype, self._options.chunk_size
        # The type alone: engines name "xpu" where tensors say "xpu:0".
        if device is not None and torch.device(device).type != view.device.type:
            raise LayoutError(f"a KV cache on {view.device}", f"one on {device}")
        if dtype is not None and not same_bytes(dtype, view.dtype):
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
