"""Faults that a test plants: the next call at a point raises, or kills its process."""

from __future__ import annotations

import errno
import functools
import json
import os
from pathlib import Path

HOOKS = Path(os.environ["HOOKS_DIRECTORY"])
MODULES = (
    "lmcache_xpu.transfer.staging",
    "lmcache_xpu.gpu_connector.registered_cache",
    "lmcache_xpu.tiers.disk.chunk_store",
    "lmcache_xpu.remote",
    "lmcache.v1.storage_backend.storage_manager",
)
AWAY_S = 3.0  # a server that failed is left alone; 10 s is long to wait for in a test


class PlantedError(RuntimeError):
    """The fault that a test asked for."""


def strike(point: str, layer: int, last_words=lambda: None) -> None:
    """Raise, or die, if a fault is planted here; it is used up by that."""
    file = HOOKS / "fault.json"
    try:
        fault = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    if fault["point"] == point and fault["layer"] == layer:
        file.unlink()
        if fault.get("kill"):
            last_words()
            os.kill(os.getpid(), 9)
        raise PlantedError(f"planted at {point}, layer {layer}")


def fragile(owner: type, name: str, point: str, *, after: bool = False) -> None:
    """Let a method fail before, or after, it has done its work."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        layer = args[2] if name in ("load", "store") and len(args) > 2 else 0
        if name == "load" and len(args) > 3:  # in cuts, each of some layers
            layer += args[0].cuts[args[3]][0]
        where = point
        if name in ("plan", "memory"):
            where = f"{point} {'load' if kwargs['loading'] else 'store'}"
        if after:
            result = original(self, *args, **kwargs)
            strike(where, layer)
            return result
        strike(where, layer)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def full_disk(write_chunk):
    """Let a file's write end half-way, as on a disk without space."""

    @functools.wraps(write_chunk)
    def wrapped(path, *rest):
        def half():
            path.write_bytes(bytes(4096) + bytes(rest[2][: len(rest[2]) // 2]))

        try:
            strike("disk write", 0, half)
        except PlantedError as error:
            half()
            raise OSError(errno.ENOSPC, "No space left on device") from error
        write_chunk(path, *rest)

    return wrapped


def plant(module) -> None:
    """The steps of a load and a store that may fail."""
    if module.__name__ == "lmcache_xpu.transfer.staging":
        for name in ("load", "store"):
            fragile(module.Stager, name, f"before {name}")
            fragile(module.Stager, name, f"after {name}", after=True)
    elif module.__name__ == "lmcache_xpu.gpu_connector.registered_cache":
        fragile(module.RegisteredCache, "plan", "plan")
        fragile(module.RegisteredCache, "memory", "check")
    elif module.__name__ == "lmcache_xpu.tiers.disk.chunk_store":
        module.write_chunk = full_disk(module.write_chunk)
    elif module.__name__ == "lmcache_xpu.remote":
        module.AWAY_S = AWAY_S
    else:
        fragile(module.StorageManager, "batched_get", "get")
        fragile(module.StorageManager, "batched_put", "put")
