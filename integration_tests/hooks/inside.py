"""Answers a test's question from inside the worker: what must come back to its start.

The question is a file by the name of a function of QUESTIONS.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import threading
import time
import types
from pathlib import Path

HOOKS = Path(os.environ["HOOKS_DIRECTORY"])

STORAGE = "lmcache.v1.distributed.storage_manager"  # the standard mode's cache
STORAGES: list = []  # those of this process, the newest last


def remember(module) -> None:
    """Note each storage manager that is made; when its module has been imported."""
    made = module.StorageManager.__init__

    @functools.wraps(made)
    def noted(self, *args, **kwargs):
        made(self, *args, **kwargs)
        STORAGES.append(self)

    module.StorageManager.__init__ = noted


def cache_engine():
    """LMCache's engine in the layerwise mode's worker; None where it is not up."""
    from lmcache.integration.vllm.utils import ENGINE_NAME

    from lmcache_xpu.versions.lmcache import in_process_module

    return in_process_module("v1.cache_engine").LMCacheEngineBuilder.get(ENGINE_NAME)


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
    """Empty the CPU tier, sooner than other chunks would; how much that was."""
    if STORAGES:
        count = STORAGES[-1].report_status()["l1_manager"]["total_object_count"]
        STORAGES[-1].clear()
        return count
    engine = cache_engine()
    return engine.storage_manager.storage_backends["LocalCPUBackend"].clear()


def look() -> dict:
    """References, pins, memory, files."""
    statm = Path("/proc/self/statm").read_text().split()
    return {
        **(look_at_storage(STORAGES[-1]) if STORAGES else look_at_engine(cache_engine())),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "resident_bytes": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def look_at_storage(storage) -> dict:
    """What the standard mode's cache has locked, lent or not answered yet."""
    status = storage.report_status()
    memory, lookups = status["l1_manager"], status["prefetch_controller"]
    return {
        "chunks": memory["total_object_count"],
        "references": [],  # nobody has any: what is read is locked
        "pins": [memory["read_locked_count"]] if memory["read_locked_count"] else [],
        "lookup_pins": lookups["in_flight_request_count"] + lookups["completed_results_count"],
        "allocated_bytes": memory["memory_used_bytes"],
        "held_bytes": memory["memory_used_bytes"] - memory["staging_bytes"],
        "storers": memory["write_locked_count"],
    }


def look_at_engine(engine) -> dict:
    """The same of the layerwise mode's."""
    backend = engine.storage_manager.storage_backends["LocalCPUBackend"]
    held = [obj.metadata for obj in list(backend.hot_cache.values())]
    allocator = backend.memory_allocator
    allocator = getattr(allocator, "pin_allocator", allocator)
    return {
        "chunks": len(held),
        "references": sorted({fact.ref_count for fact in held} - {1}),
        "pins": sorted({fact.pin_count for fact in held} - {0}),
        "lookup_pins": len(engine.lookup_pins),
        "allocated_bytes": getattr(allocator, "total_allocated_size", None),
        "held_bytes": sum(fact.phy_size for fact in held),
        "storers": storers(),
    }


def settled() -> bool:
    """Wait until all that was stored is published and written; whether it is."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return True  # an engine without offload
    if STORAGES:
        transfers = get_kv_transfer_group().worker_half.transfers

        def stores() -> bool:
            return transfers.busy or is_writing(STORAGES[-1].report_status())
    else:
        engine = cache_engine()
        tier = engine.storage_manager.storage_backends.get("disk")

        def stores() -> bool:
            return tier is not None and bool(tier.pending)

    deadline = time.monotonic() + 15
    while stores():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_writing(status: dict) -> bool:
    """Whether the standard mode's cache has not yet sent all to its other tiers."""
    controller = status["store_controller"]
    queued = [tier.get("pending") or tier.get("queued_bytes") for tier in status["l2_adapters"]]
    return bool(
        controller["pending_keys_count"] or controller["in_flight_task_count"] or any(queued)
    )


QUESTIONS = {question.__name__: question for question in (clear, look, settled, split)}


def is_worker() -> bool:
    """Whether the model runs in this process: vLLM's worker, or an engine that has none beside."""
    name = multiprocessing.current_process().name
    beside = (child.name for child in multiprocessing.active_children())
    return "Worker" in name or ("Engine" in name and not any("Worker" in each for each in beside))


def watch() -> None:
    """Answer, if this process is the worker."""
    while True:
        time.sleep(0.05)
        if not is_worker():
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
