"""Answers a test's question from inside the worker: what must come back to its start.

The question is a file by the name of a function of QUESTIONS.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
import time
import types
from pathlib import Path

HOOKS = Path(os.environ["HOOKS_DIRECTORY"])


def cache_engine():
    """LMCache's engine in the worker; None where it is not up."""
    from lmcache.integration.vllm.utils import ENGINE_NAME

    from lmcache_xpu.versions.lmcache import LMCacheEngineBuilder

    return LMCacheEngineBuilder.get(ENGINE_NAME)


def storers() -> int:
    """Layerwise stores that were begun and not ended: generators, of which LMCache keeps a list."""
    generators = [obj for obj in gc.get_objects() if type(obj) is types.GeneratorType]
    return sum(g.gi_frame is not None and g.__name__ == "store_layer" for g in generators)


def split() -> int:
    """Leave the last layer of each chunk to the disk tier; how many layers that were."""
    engine = cache_engine()
    backend = engine.storage_manager.storage_backends["LocalCPUBackend"]
    last = [key for key in list(backend.hot_cache) if key.layer_id == engine.num_layers - 1]
    return sum(backend.remove(key) for key in last)


def clear() -> int:
    """Empty the CPU tier, sooner than other chunks would; how many tokens that were."""
    engine = cache_engine()
    return engine.storage_manager.storage_backends["LocalCPUBackend"].clear()


def look() -> dict:
    """References, pins, memory, files."""
    engine = cache_engine()
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
        "storers": storers(),
    }


def settled() -> bool:
    """Wait until all that was stored is published and written; whether it is."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    if not has_kv_transfer_group():
        return True  # an engine without offload
    engine = cache_engine()
    engine.gpu_connector.overlap.drain()
    tier = engine.storage_manager.storage_backends.get("disk")
    deadline = time.monotonic() + 15
    while tier is not None and tier.pending:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


QUESTIONS = {question.__name__: question for question in (clear, look, settled, split)}


def watch() -> None:
    """Answer, if this process is the worker."""
    while True:
        time.sleep(0.05)
        if "Worker" not in multiprocessing.current_process().name:
            continue
        asked = [name for name in QUESTIONS if (HOOKS / name).exists()]
        try:
            answers = [json.dumps(QUESTIONS[name]()) for name in asked]
        except (ImportError, AssertionError, AttributeError):
            continue  # not yet up
        for name, answer in zip(asked, answers, strict=True):
            (HOOKS / name).unlink(missing_ok=True)
            (HOOKS / "answer.tmp").write_text(answer)
            (HOOKS / "answer.tmp").rename(HOOKS / "answer.json")


def start() -> None:
    """Watch for questions as long as the process lives."""
    threading.Thread(target=watch, daemon=True).start()
