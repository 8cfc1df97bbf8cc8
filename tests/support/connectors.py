"""Connectors for a cache, LMCache's memory objects, and the slots of blocks."""

from __future__ import annotations

import torch
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from support import caches
from support.imitation import GPU, ON_HOST

from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2

# Beside an accelerator LMCache's memory is pinned, and kernels reach small pieces of it.
UNPINNED = AdHocMemoryAllocator("cpu")
ALLOCATOR = UNPINNED if ON_HOST else PinMemoryAllocator(2**26)


def make(cache, kind=VLLMPagedMemXPUConnectorV2, **options):
    return kind(
        cache.geometry.hidden,
        cache.spec.layers,
        dtype=cache.spec.dtype,
        device=caches.DEVICE,
        use_mla=cache.geometry.mla,
        layout_hints={"kv_layout": cache.geometry.kv_layout} if cache.geometry.kv_layout else None,
        **options,
    )


def memory(connector, tokens: int, dtype=torch.bfloat16, fmt=None):
    fmt = fmt or (MemoryFormat.KV_MLA_FMT if connector.use_mla else connector.FORMAT)
    gpu = GPU.here
    pinned = gpu is None or gpu.machine.memory == "pinned"
    allocator = ALLOCATOR if pinned else UNPINNED
    allocated = allocator.allocate(connector.get_shape(tokens), dtype, fmt)
    if gpu is not None and pinned and ON_HOST:
        gpu.pin(allocated.raw_tensor)
    allocated.tensor.view(torch.uint8).random_(0, 256)
    return allocated


def slots_of(*blocks: int, tokens: int = 4) -> torch.Tensor:
    return (torch.tensor(blocks)[:, None] * tokens + torch.arange(tokens)).flatten()


def objects(connector, spans, dtype=torch.bfloat16):
    """Memory of chunks, `[layer][chunk]`."""
    sizes = [end - start for start, end in zip(*spans, strict=True)]
    return [[memory(connector, size, dtype) for size in sizes] for _ in range(connector.num_layers)]
