"""Faults that a test plants: the next call at a point raises, or kills its process.

The points are public names alone, here as in the other hooks: how a module does its work may change
without them.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
from pathlib import Path

HOOKS = Path(os.environ["HOOKS_DIRECTORY"])
MODULES = (
    "lmcache_xpu.transfer.gather_scatter",
    "lmcache_xpu.gpu_connector.base",
    "lmcache_xpu.copies.group_copies",
    "lmcache_xpu.copies.moves",
    "lmcache_xpu.tiers.disk.chunk_file",
    "lmcache_xpu.tiers.shared_l2",
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


def no_layer(args: tuple, kwargs: dict) -> int:
    """The layer of a call that is for all of them."""
    return 0


def first_layer(args: tuple, kwargs: dict) -> int:
    """The layer that a gather or a scatter begins with; they are called with rows and memory."""
    return args[2] if len(args) > 2 else kwargs.get("first_layer", 0)


def fragile(owner: type, name: str, point: str, *, after: bool = False, layer=no_layer) -> None:
    """Let a method fail before, or after, it has done its work."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        where = point
        if "loading" in kwargs:  # a step of both ways
            where = f"{point} {'load' if kwargs['loading'] else 'store'}"
        if after:
            result = original(self, *args, **kwargs)
            strike(where, layer(args, kwargs))
            return result
        strike(where, layer(args, kwargs))
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def owner_of(module, name: str) -> type:
    """The one class of a module that has a method of this name."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    (owner,) = [c for c in classes if c.__module__ == module.__name__ and name in vars(c)]
    return owner


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
    name = module.__name__.removeprefix("lmcache_xpu.")
    if name == "transfer.gather_scatter":
        for way, method in (("load", "scatter"), ("store", "gather")):
            transfer = module.TorchTransfer
            fragile(transfer, method, f"before {way}", layer=first_layer)
            fragile(transfer, method, f"after {way}", after=True, layer=first_layer)
    elif name == "gpu_connector.base":
        fragile(owner_of(module, "plan"), "plan", "plan")
        fragile(owner_of(module, "memory"), "memory", "check")
    elif name == "copies.group_copies":  # the standard mode's, as what follows
        for way, method in (("load", "load"), ("load", "beside_layers"), ("store", "store")):
            fragile(module.GroupCopies, method, f"plan {way}")
    elif name == "copies.moves":
        fragile(module.Located, "check", "get")
        fragile(module.Moves, "store", "put")
    elif name == "tiers.disk.chunk_file":
        module.write_chunk = full_disk(module.write_chunk)
    elif name == "tiers.shared_l2":
        module.AWAY_S = AWAY_S
    else:
        fragile(module.StorageManager, "batched_get", "get")
        fragile(module.StorageManager, "batched_put", "put")
