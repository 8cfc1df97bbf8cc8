"""A round trip on the device: an engine's stores and loads, before one is started."""

from __future__ import annotations

import torch

from lmcache_xpu.doctor.check import Check, fail, ok, skip
from lmcache_xpu.transfer.devices import is_host
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostFormat, HostMemory
from lmcache_xpu.transfer.slots import request_rows
from lmcache_xpu.transfer.staging import Stager

LAYERS, HEADS, DIM, BLOCK_TOKENS, BLOCKS = 3, 8, 128, 16, 40
CHUNK_TOKENS, CHUNKS = 256, 2
STAGING_BYTES = 16 * 2**20


def check_transfer(device_type: str) -> Check:
    """Check that chunks come back as they were stored, through staging and by a kernel."""
    name = "transfer"
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        return skip(name, f"PyTorch sees no {device_type} here")
    report = "Serve without offload (offload=false) until that is understood, and report it."
    try:
        staged, direct = round_trips(torch.device(device_type))
    except Exception as error:  # whatever a driver or a compiler raises is what was found
        return fail(name, f"{type(error).__name__}: {error}", report)
    if not staged or direct is False:
        wrong = "read by a kernel" if staged else "staged"
        return fail(name, f"other bytes than were stored, {wrong}", report)
    how = "staged, and read by a kernel" if direct else "staged"
    if device_type == "cpu":
        how = "in place"
    return ok(name, f"{CHUNKS} chunks stored and loaded, {how}: every byte")


def round_trips(device: torch.device) -> tuple[bool, bool | None]:
    """Store two chunks of a small paged KV cache, and load them through staging and by a kernel.

    Returns whether every byte came back, through each; None where kernels don't reach host memory.
    The cache is fused as vLLM's is on Intel GPUs, its blocks are scattered, and some of it belongs
    to nobody and has to stay as it is. Waits for the device.
    """
    cache = torch.randint(
        256, (LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, 4 * DIM), dtype=torch.uint8, device=device
    )
    engine = [layer.view(torch.bfloat16).permute(0, 2, 1, 3) for layer in cache]
    geometry = Geometry(hidden=HEADS * DIM, kv_layout="LBNHC")
    stager = Stager(PagedView.from_engine(engine, geometry, num_layers=LAYERS), STAGING_BYTES)
    tokens = CHUNK_TOKENS * CHUNKS
    blocks = torch.randperm(BLOCKS)[: tokens // BLOCK_TOKENS]
    numbers = (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
    spans = [(at, at + CHUNK_TOKENS) for at in range(0, tokens, CHUNK_TOKENS)]
    rows = request_rows(stager.view, numbers, spans)
    form = HostFormat(LAYERS, 2, "layers")
    size = CHUNK_TOKENS * LAYERS * HEADS * 2 * DIM * torch.bfloat16.itemsize
    pins = not is_host(device)
    memory = HostMemory(torch.zeros(size, dtype=torch.uint8, pin_memory=pins) for _ in spans)
    stager.follow_engine()
    stager.store(stager.plan(form, rows), memory).done.synchronize()
    expected = torch.zeros_like(cache)
    expected[:, blocks.to(device)] = cache[:, blocks.to(device)]

    def comes_back(*, idle: bool) -> bool:
        cache.zero_()
        stager.follow_engine()
        for group in stager.plan(form, rows, range(LAYERS)).groups:
            done = stager.load(group.pieces, memory, idle=idle)
        done.synchronize()
        return torch.equal(cache, expected)

    return comes_back(idle=False), comes_back(idle=True) if stager.reaches_host else None
