"""Answers a test's question from inside the worker: what must come back to its start."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

HOOKS = Path(os.environ["HOOKS_DIRECTORY"])


def seen() -> dict:
    """References, pins, memory, files."""
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
    """Answer, if this process is the worker."""
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


def start() -> None:
    """Watch for questions as long as the process lives."""
    threading.Thread(target=watch, daemon=True).start()
