"""The memory of LMCache's objects as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.errors import HostMemoryError
from lmcache_xpu.transfer.devices import is_host
from lmcache_xpu.transfer.host_memory import HostMemory


def chunk_bytes(
    memory_objs: Sequence[MemoryObj], sizes: Sequence[int], device: torch.device
) -> HostMemory:
    """Return the bytes of LMCache's memory objects, flat.

    LMCache may give an object more bytes than its shape needs.

    Args:
        memory_objs: one per chunk.
        sizes: bytes that each of them needs.
        device: of the engine.

    Raises:
        HostMemoryError: memory that is gone or strided, too small, or elsewhere.
    """
    memory = HostMemory()
    for memory_obj, size in zip(memory_objs, sizes, strict=True):
        # Not `tensor`, which makes three views of it: hundreds of chunks wait for this.
        raw: torch.Tensor | None = memory_obj.raw_tensor
        if raw is None or not raw.is_contiguous():
            raise HostMemoryError("memory that is gone or strided", "valid and contiguous")
        if raw.nbytes < size:
            raise HostMemoryError(f"memory of {raw.nbytes} bytes", f"{size}")
        if raw.dim() != 1 or raw.dtype != torch.uint8:
            raw = raw.view(-1).view(torch.uint8)
        memory.append(raw)
    for elsewhere in memory.devices - {device}:
        if not is_host(elsewhere):
            raise HostMemoryError(f"memory on {elsewhere}", f"cpu or {device}")
    return memory
