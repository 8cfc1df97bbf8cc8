"""Imported by every Python process of an engine under test: plants faults, and looks inside.

A process stack starts its engines with this directory on PYTHONPATH and LMCACHE_XPU_TEST_HOOKS, a
directory: the test writes `fault.json` there, and the next call that fits it raises. It writes
`look`, and the worker answers with `seen.json`. Without these files everything is as it is.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
import time
import types
from pathlib import Path

HOOKS = Path(os.environ["HOOKS_DIRECTORY"]) if "HOOKS_DIRECTORY" in os.environ else None


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
        layer = kwargs.get("cut") or layer  # of a load in cuts of several layers
        where = point
        if name in ("plan", "check_objects"):
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
    if module.__name__ == "lmcache_xpu.staging":
        for name in ("load", "store"):
            fragile(module.Stager, name, f"before {name}")
            fragile(module.Stager, name, f"after {name}", after=True)
    elif module.__name__ == "lmcache_xpu.binding":
        fragile(module.Binding, "plan", "plan")
        fragile(module.Binding, "check_objects", "check")
    elif module.__name__ == "lmcache_xpu.disk.chunk_store":
        module.write_chunk = full_disk(module.write_chunk)
    else:
        fragile(module.StorageManager, "batched_get", "get")
        fragile(module.StorageManager, "batched_put", "put")


def broken(module) -> None:
    """Take away the part that `--break` names, to see its tests fail."""
    part = os.environ.get("HOOKS_BREAK")
    nothing = lambda *_, **__: None  # noqa: E731
    if module.__name__ == "lmcache_xpu.guards":
        if part == "guard":
            module.Guard._lost = reraise
            module._complain = reraise
        elif part in ("withhold", "_take_back"):
            setattr(module.Guard, part, nothing)
    elif module.__name__ == "lmcache_xpu.isolation":
        if part == "salt":
            module.salt_of = lambda request: ""
        elif part == "finished":
            module.Isolation.finished = nothing
    elif part == "weights" and module.__name__ == "lmcache_xpu.weights":
        module.fingerprint = lambda *_: "same"
    elif part == "checksum" and module.__name__ == "lmcache_xpu.disk.chunk_file":
        module.zlib = types.SimpleNamespace(crc32=lambda *_: 0)
    elif part == "shift" and module.__name__ == "lmcache_xpu.transfer":
        scatter = module.TorchTransfer.scatter

        def shifted(self, rows, *rest):
            scatter(self, rows._replace(engine=rows.engine.roll(1)), *rest)

        module.TorchTransfer.scatter = shifted


def reraise(*_, **__):
    """What happens without a guard."""
    raise


def seen() -> dict:
    """What must come back to its start: references, pins, memory, files."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    adapter = get_kv_transfer_group()._lmcache_engine
    engine = adapter.lmcache_engine
    backend = engine.storage_manager.storage_backends["LocalCPUBackend"]
    held = [obj.metadata for obj in list(backend.hot_cache.values())]
    allocator = backend.memory_allocator
    allocator = getattr(allocator, "pin_allocator", allocator)
    statm = Path("/proc/self/statm").read_text().split()
    return {
        "chunks": len(held),
        "references": sorted({fact.ref_count for fact in held} - {1}),
        "pins": sorted({fact.pin_count for fact in held} - {0}),
        "lookup_pins": len(engine.lookup_pins),
        "allocated_bytes": getattr(allocator, "total_allocated_size", None),
        "held_bytes": sum(fact.phy_size for fact in held),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "resident_bytes": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
        "storers": len(adapter._layerwise_save_storers),
    }


def watch() -> None:
    """Answer a test's question, if this process is the worker."""
    while True:
        time.sleep(0.1)
        if not (HOOKS / "look").exists():
            continue
        try:
            answer = json.dumps(seen())
        except (ImportError, AssertionError, AttributeError):
            continue  # not the worker
        (HOOKS / "look").unlink(missing_ok=True)
        (HOOKS / "seen.tmp").write_text(answer)
        (HOOKS / "seen.tmp").rename(HOOKS / "seen.json")


if HOOKS is not None:
    import wrapt

    for name in (
        "lmcache_xpu.staging",
        "lmcache_xpu.binding",
        "lmcache_xpu.disk.chunk_store",
        "lmcache.v1.storage_backend.storage_manager",
    ):
        wrapt.register_post_import_hook(plant, name)
    for name in ("guards", "isolation", "weights", "disk.chunk_file", "transfer"):
        wrapt.register_post_import_hook(broken, f"lmcache_xpu.{name}")
    threading.Thread(target=watch, daemon=True).start()
