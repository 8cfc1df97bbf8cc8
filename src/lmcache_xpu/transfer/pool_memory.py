"""How LMCache's CPU tier gets exactly the memory that it asks for, on Intel GPUs.

LMCache asks PyTorch for pinned memory. PyTorch rounds such an allocation up to a power of two, and
Intel's driver refuses one of about the card's memory: PyTorch 2.13 then returns address 0, and 2.14
raises. So

    PyTorch     is told not to round (`allocator_variables`, set by `lmcache-xpu serve`)
    the tier    is one pinned allocation as long as that is exact and below a limit (`fits`)
    beyond it   it is ordinary memory (`PoolMemory`), which `host_copies` registers with the driver

Untried on an Intel GPU. The limit is what owners of Arc cards reported to work.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

MIB, GIB = 2**20, 2**30

# PyTorch takes all three, the first one that is set.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ROUNDED, CACHED = "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"
# Above this nothing is rounded, and nothing kept for reuse. Not ROUNDED: with it PyTorch 2.13 may
# reuse a freed block that is too small (aten/src/ATen/core/CachingHostAllocator.h, get_free_block;
# 2.14 looks). A power of two, so that no kept block is larger.
CACHED_MIB = 1024
SINCE = (2, 13)  # what an older PyTorch doesn't know may end it

# One pinned allocation of 16 GiB was reported to work, and one of 32 GiB to fail, on a card of 32.
MOST_GIB = 16
PART_OF_CARD = 0.9


def limit(card_bytes: int | None = None) -> int:
    """Return the bytes of the largest pinned allocation, by the memory of the smallest card."""
    most = MOST_GIB * GIB
    return most if card_bytes is None else min(most, int(PART_OF_CARD * card_bytes))


def exact_above(environ: Mapping[str, str]) -> float:
    """Return the bytes above which PyTorch pins exactly what it is asked for; else infinity."""
    return min(_options(environ).values(), default=math.inf) * MIB


def fits(size: int, most: int, environ: Mapping[str, str]) -> bool:
    """Whether a tier of `size` bytes may be one pinned allocation, and will take no more."""
    return exact_above(environ) < size <= most


def allocator_variables(environ: Mapping[str, str], torch: str | None) -> dict[str, str]:
    """Return variables that let PyTorch pin exactly what it is asked for, added to what is set.

    None for a version of PyTorch that does not know the option, or where it is told already.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", torch or "")[:2])
    if release < SINCE or exact_above(environ) < math.inf:
        return {}
    # Whichever PyTorch reads.
    names = [name for name in VARIABLES if environ.get(name)] or [VARIABLES[-1]]
    option = f"{CACHED}:{CACHED_MIB}"
    return {name: ",".join(filter(None, (environ.get(name), option))) for name in names}


def _options(environ: Mapping[str, str]) -> dict[str, int]:
    text = next((environ[name] for name in VARIABLES if environ.get(name)), "")
    options = re.findall(rf"({ROUNDED}|{CACHED})\s*:\s*(\d+)", text)
    return {name: int(mib) for name, mib in options}


class PoolMemory:
    """`lmcache.device_ops` that allocate and free LMCache's pool, pinned up to `most` bytes.

    Other memory is page-aligned, zero, resident and exactly as large as asked for. It stays until
    the process ends: the driver may know it.
    """

    def __init__(self, ops: Any, most: int, environ: Mapping[str, str]) -> None:
        self._allocate, self._free = ops.alloc_pinned_ptr, ops.free_pinned_ptr
        self._most, self._environ = most, environ
        self._pools: dict[int, mmap.mmap] = {}

    @classmethod
    def bind(cls, ops: Any, most: int, environ: Mapping[str, str]) -> Self:
        """Let LMCache use it from now on, and return it; may be called again."""
        bound = getattr(ops.alloc_pinned_ptr, "__self__", None)
        if isinstance(bound, cls):
            return bound
        pool = cls(ops, most, environ)
        # As LMCache binds the operations of its own extensions. Off CUDA it knows no NUMA nodes.
        names = SimpleNamespace(
            alloc_pinned_ptr=pool.allocate,
            free_pinned_ptr=pool.free,
            alloc_pinned_numa_ptr=pool.allocate,
            free_pinned_numa_ptr=pool.free,
        )
        ops.bind_native(names)
        return pool

    def has_pinned(self, address: int) -> bool:
        """Whether memory that LMCache has allocated here is pinned."""
        return address not in self._pools

    def allocate(self, size: int, flags: int = 0) -> int:
        """Return the address of `size` bytes of zeros; OSError if there is not so much memory."""
        if fits(size, self._most, self._environ):
            address: int = self._allocate(size, flags)
            return address
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        pool = mmap.mmap(-1, size, flags=kind)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
        self._pools[address] = pool
        return address

    def free(self, address: int, size: int | None = None) -> None:
        """Free pinned memory; what the driver may know stays."""
        if address not in self._pools:
            self._free(address)
