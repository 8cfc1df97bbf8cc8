"""The engine's KV cache as it is registered with a connector, and every check of a transfer.

All checks come before the first byte moves. Negative slots are skipped in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.errors import HostMemoryError, LayoutError, TransferError
from lmcache_xpu.gpu_connector.connector_options import ChunkFormat, ConnectorOptions, same_bytes
from lmcache_xpu.transfer.devices import is_host
from lmcache_xpu.transfer.paged_view import EngineLayer, PagedView
from lmcache_xpu.transfer.plan import HostMemory, Plan
from lmcache_xpu.transfer.slots import check_slots
from lmcache_xpu.transfer.staging import Stager


class RegisteredCache:
    """The engine's KV cache at one place in memory, ready to be stored and loaded.

    Args:
        kvcaches: one tensor, or a group of tensors, for each layer.
        num_layers: of the model.
        options: of the connector.
        chunk_format: of the host memory that it is moved to and from.

    Attributes:
        addresses: of all its tensors.
        view: the cache, whatever its layout.
        stager: moves its bytes.

    Raises:
        LayoutError: it can't be read, or is not what the connector was made for.
        SettingsError: no memory for staging.
    """

    def __init__(
        self,
        kvcaches: Sequence[EngineLayer],
        num_layers: int,
        options: ConnectorOptions,
        chunk_format: ChunkFormat,
    ) -> None:
        self._format = chunk_format
        self.addresses = [at for layer in kvcaches for at in addresses_of(layer)]
        self.view = PagedView.from_engine(
            kvcaches,
            chunk_format.geometry,
            num_layers=num_layers,
            opaque_blocks=options.opaque_blocks,
        )
        _check_view(self.view, options)
        with torch.inference_mode(False):  # what is kept may be written from either mode
            self.stager = Stager(self.view, options.staging_bytes)

    def plan(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor | None,
        cached: int = 0,
    ) -> Plan:
        """Plan where each chunk's tokens go.

        Args:
            starts: first token of each chunk in the request.
            ends: the token after its last.
            slot_mapping: `[tokens]`, one slot per token of the whole request.
            cached: leading tokens that a load leaves alone, because vLLM's own prefix cache has
                them and other requests may share their blocks.

        Raises:
            TransferError: spans that don't fit each other or the slot mapping, bad slots.
        """
        if slot_mapping is None:
            raise TransferError("no slot_mapping", "a slot per token as keyword 'slot_mapping'")
        if len(starts) != len(ends):
            raise TransferError(f"{len(starts)} starts and {len(ends)} ends", "as many of each")
        slots = check_slots(self.view, slot_mapping)
        spans = list(zip(starts, ends, strict=True))
        return self.stager.plan(self._format.host, slots, spans, cached)

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
            if self._format.geometry.mla and not loading:
                # LMCache's allocators name their default format; what we store is MLA's.
                metadata.fmt = self._format.name
            kind = (end - start, metadata.fmt, metadata.shape, metadata.dtype)
            if kind != checked:
                size = self._format.object_bytes(*kind, self.view.dtype)
                checked = kind
            # Not `tensor`, which makes three views of it, for each of hundreds of chunks.
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


def addresses_of(layer: EngineLayer) -> list[int]:
    """Return the addresses of a layer's tensors."""
    tensors = [layer] if isinstance(layer, torch.Tensor) else layer
    return [tensor.data_ptr() for tensor in tensors]


def _check_view(view: PagedView, options: ConnectorOptions) -> None:
    device, dtype, chunk = options.device, options.dtype, options.chunk_size
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
