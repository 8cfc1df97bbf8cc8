"""How the CPU tier gets its memory: PyTorch's allocator, and LMCache's operations bound by us."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.platform.base.device_ops import DeviceOps

import lmcache_xpu.stock.gpu_connectors as module
from lmcache_xpu.transfer import devices, host_copies
from lmcache_xpu.transfer.host_copies import HostCopies
from lmcache_xpu.transfer.plan import HostMemory
from lmcache_xpu.transfer.pool_memory import (
    PoolMemory,
    allocator_variables,
    exact_above,
    fits,
    limit,
)

MIB, GIB = 2**20, 2**30
PAGE = os.sysconf("SC_PAGESIZE")
OURS = "pinned_max_cached_size_mb:1024"
EXACT = {"PYTORCH_ALLOC_CONF": OURS}


# What PyTorch is told


@pytest.mark.parametrize(
    ("before", "merged"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": OURS}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": OURS}),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{OURS}"},
        ),
        (  # which PyTorch 2.13 prefers to the other
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "x:1"},
            {
                "PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{OURS}",
                "PYTORCH_ALLOC_CONF": f"x:1,{OURS}",
            },
        ),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:64"}, {}),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:64"}, {}),
    ],
)
def test_what_is_set_of_pinned_memory_stays_and_the_rest_is_added_to(before, merged):
    assert allocator_variables(before, "2.14.0") == merged


@pytest.mark.parametrize(("torch_", "told"), [("2.13.0", 1), ("3.0", 1), ("2.9.0", 0), (None, 0)])
def test_a_pytorch_that_does_not_know_the_option_is_not_told(torch_, told):
    assert len(allocator_variables({}, torch_)) == told


def test_this_pytorch_reads_it_as_it_was_meant():
    """What it then does takes an accelerator; its header has the rule that `exact_above` states."""
    env = {
        **os.environ,
        **allocator_variables({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "2.13"),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch._C._accelerator_getAllocatorSettings())"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"max_split_size_mb:64,{OURS}"
    assert "Warning" not in done.stderr
    header = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    rule = (
        "if (size <= pinned_max_round_threshold() && size <= pinned_max_cached_size()) "
        "{ return c10::llvm::PowerOf2Ceil(size); } else { return size; }"
    )
    assert rule in " ".join(header.read_text().split())


def test_which_sizes_are_pinned_as_they_are():
    assert exact_above({}) == math.inf
    assert exact_above(EXACT) == GIB
    both = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:512, pinned_max_round_threshold_mb:64"}
    assert exact_above(both) == 64 * MIB
    assert exact_above({"PYTORCH_CUDA_ALLOC_CONF": "backend:native", **EXACT}) == math.inf
    assert fits(12 * GIB, limit(), EXACT)
    assert fits(16 * GIB, limit(), EXACT)
    assert not fits(16 * GIB + 1, limit(), EXACT)
    assert not fits(16 * GIB, limit(16 * GIB), EXACT)
    assert not fits(12 * GIB, limit(), {})  # PyTorch would take 16


# What LMCache allocates


@pytest.fixture
def ops(monkeypatch):
    """LMCache's operations as they are on XPU without its extension: PyTorch's alone."""
    ops, asked = DeviceOps(), []
    allocate = ops.alloc_pinned_ptr

    def seen(size, flags=0):
        asked.append(size)
        return allocate(size, flags)

    ops.alloc_pinned_ptr = seen
    ops.asked = asked
    monkeypatch.setattr("lmcache.device_ops", ops)
    monkeypatch.setattr("lmcache.v1.memory_management.device_ops", ops)
    return ops


@pytest.fixture
def card(monkeypatch):
    """A card of so many bytes, asked for as PyTorch's."""

    def make(size):
        properties = SimpleNamespace(total_memory=size)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)

    return make


XPU = torch.device("xpu")


def resident(address: int, size: int) -> int:
    """Bytes of it that are in memory, by the kernel."""
    pages = (ctypes.c_ubyte * (size // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return PAGE * sum(page & 1 for page in pages)


def test_a_pool_beyond_the_limit_is_ordinary_memory_that_is_registered(ops, card, monkeypatch):
    """The whole way with LMCache's own allocator, but for the driver."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_cached_size_mb:16")
    card(100 * MIB)  # a limit of 90 MiB
    module.limit_pinning(XPU)
    module.limit_pinning(XPU)  # another connector in this process
    pool = MixedMemoryAllocator(96 * MIB)
    assert ops.asked == []  # PyTorch 2.13 would hand out address 0
    assert pool.buffer.nbytes == pool.buffer.untyped_storage().nbytes() == 96 * MIB
    address = pool.buffer.data_ptr()
    assert address % PAGE == 0
    assert resident(address, 96 * MIB) == 96 * MIB
    assert not pool.buffer.any()
    pool.buffer.fill_(7)

    registered = []

    def register(*what):
        registered.append(what)
        return True

    monkeypatch.setattr(host_copies, "register_host", register)
    memory = HostCopies(XPU)
    assert memory.pinned(HostMemory([pool.buffer]))
    assert memory.pinned(HostMemory([pool.buffer[MIB : 2 * MIB]]))  # a chunk of it
    assert registered == [(address, 96 * MIB, XPU)]
    pool.close()
    assert ctypes.string_at(address, 1) == b"\7"  # the driver may still have it


def test_a_pool_within_the_limit_is_lmcaches_own(ops, card, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_cached_size_mb:16")
    card(100 * MIB)
    module.limit_pinning(XPU)
    pool = MixedMemoryAllocator(24 * MIB)
    assert ops.asked == [24 * MIB]
    assert pool.buffer.nbytes == 24 * MIB
    pool.close()


def test_nothing_is_pinned_that_pytorch_would_round_up(ops, card, monkeypatch):
    """An engine that was started without `lmcache-xpu serve`."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    card(24 * GIB)
    module.limit_pinning(XPU)
    assert MixedMemoryAllocator(24 * MIB).buffer.nbytes == 24 * MIB
    assert ops.asked == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_elsewhere_lmcache_allocates_as_it_does(ops, device):
    before = ops.alloc_pinned_ptr
    module.limit_pinning(torch.device(device))
    assert ops.alloc_pinned_ptr is before
    assert devices.most_pinned(torch.device(device)) is None


def test_lmcaches_pool_on_the_host_is_as_large_as_the_tier():
    pool = MixedMemoryAllocator(24 * MIB)
    taken = pool.buffer.untyped_storage().nbytes()
    assert taken == 24 * MIB
    # One page more is what LMCache aligns it with.
    from lmcache.v1.platform.torch_ops.mem_alloc import _tensor_registry

    backing = _tensor_registry[pool.buffer.data_ptr()].untyped_storage()
    assert backing.nbytes() == 24 * MIB + PAGE
    pool.close()


def test_numa_is_no_way_around_it(ops, monkeypatch):
    PoolMemory.bind(ops, 90 * MIB, {})
    address = ops.alloc_pinned_numa_ptr(2 * MIB, 0)
    assert ops.asked == []
    ops.free_pinned_numa_ptr(address, 2 * MIB)
    assert ctypes.string_at(address, 1) == b"\0"
