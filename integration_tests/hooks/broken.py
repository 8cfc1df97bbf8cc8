"""Takes away the part of the product that HOOKS_BREAK names; see ../breaks.py for what they do."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types

PART = os.environ.get("HOOKS_BREAK", "")
WAYS = {}  # (part, module) -> what to do with the module


def breaks(part: str, module: str):
    """Register a way to break a module, by its name or by its path in lmcache_xpu."""
    name = module if module.startswith("lmcache.") else f"lmcache_xpu.{module}"

    def register(way):
        WAYS[part, name] = way
        return way

    return register


def nothing(*_, **__) -> None:
    """Instead of what would be done."""


def reraise(*_, **__) -> None:
    """Let an error through to whoever called; make one where there is none."""
    raise


@breaks("blocks", "transfer.gather_scatter")
def _(module) -> None:
    scatter = module.TorchTransfer.scatter

    def one_left_out(self, rows, *rest):
        # Two blocks that change places would not do: keys carry their positions, and attention
        # does not see in which order they lie.
        engine = rows.engine.clone()
        engine[-1] = engine[0]
        scatter(self, rows._replace(engine=engine), *rest)

    module.TorchTransfer.scatter = one_left_out


@breaks("guard", "metrics")
def _(module) -> None:
    failed, flows = module.Flow.failed, (module.LOAD_CPU, module.STORE_CPU)

    def let_through(self, reason):
        """Whoever catches an error counts it."""
        (reraise if self in flows else failed)(self, reason)

    module.Flow.failed = let_through


@breaks("guard", "lmcache.v1.storage_backend.storage_manager")
def _(module) -> None:
    contains = module.StorageManager.contains

    def let_through(self, *args, **kwargs):
        """Who catches LMCache's assertion that chunks are in one tier looks for the best tier."""
        if isinstance(sys.exception(), AssertionError):
            raise
        return contains(self, *args, **kwargs)

    module.StorageManager.contains = let_through


@breaks("report", "connector.connector")
def _(module) -> None:
    connector = module.LMCacheXPUServerConnector
    take, results = connector.get_block_ids_with_load_errors, connector.get_transfer_results

    def forgotten(self):
        take(self)
        return set()

    def all_succeeded(self, finished_req_ids):
        answer = results(self, finished_req_ids)
        answer.failed_recving.clear()
        return answer

    connector.get_block_ids_with_load_errors = forgotten
    connector.get_transfer_results = all_succeeded


@breaks("withhold", "stock.worker")
def _(module) -> None:
    module.WITHHELD_STEPS = 0


@breaks("counters", "metrics")
def _(module) -> None:
    module.Flow.failed = nothing
    module.fallback = nothing


@breaks("bytes", "metrics")
def _(module) -> None:
    moved = module.Flow.moved

    def half(self, seconds, *, size_bytes, tokens):
        moved(self, 0.0, size_bytes=size_bytes // 2, tokens=tokens)

    module.Flow.moved = half


@breaks("parameters", "connector.request_guard")
def _(module) -> None:
    module.guarded = lambda hook: contextlib.nullcontext()


@breaks("labels", "vllm_hooks.patches")
def _(module) -> None:
    module.PATCHES = [p for p in module.PATCHES if not p.module.startswith("lmcache.")]


@breaks("salt", "connector.keys")
def _(module) -> None:
    module.salt_of = lambda request: ""


@breaks("computed", "stock.scheduler")
def _(module) -> None:
    module.may_be_served = lambda request: True


@breaks("finished", "cache.local_client")
def _(module) -> None:
    module.LocalLookUps.end = module.LocalLookUps.forget


@breaks("reset", "connector.connector")
def _(module) -> None:
    module.LMCacheXPUServerConnector.reset_cache = nothing


@breaks("references", "cache.local_cache")
def _(module) -> None:
    module.LocalCache.release = nothing


@breaks("references", "lmcache.v1.storage_backend.storage_manager")
def _(module) -> None:
    manager = module.StorageManager
    get, get_layers = manager.batched_get, manager.layerwise_batched_get

    def keep(memory_objs):
        for obj in memory_objs or ():
            if obj is not None:
                obj.ref_count_up()

    @functools.wraps(get)
    def kept(self, *args, **kwargs):
        memory_objs = get(self, *args, **kwargs)
        keep(memory_objs)
        return memory_objs

    @functools.wraps(get_layers)
    def layers_kept(self, *args, **kwargs):
        for layer in get_layers(self, *args, **kwargs):
            layer.add_done_callback(lambda done: keep(done.result()))
            yield layer

    manager.batched_get, manager.layerwise_batched_get = kept, layers_kept


@breaks("weights", "model.model_fingerprint")
def _(module) -> None:
    module.fingerprint = lambda *_: "same"


@breaks("checksum", "tiers.disk.chunk_file")
def _(module) -> None:
    module.zlib = types.SimpleNamespace(crc32=lambda *_: 0)


@breaks("modes", "tiers.disk.chunk_file")
def _(module) -> None:
    write_chunk = module.write_chunk

    def readable(path, *rest):
        write_chunk(path, *rest)
        path.chmod(0o644)

    module.write_chunk = readable


@breaks("evict", "tiers.disk.chunk_index")
def _(module) -> None:
    module.ChunkIndex.fits = lambda *_: True


@breaks("shared", "tiers.shared_values")
def _(module) -> None:
    module.SharedValues.exist = lambda _, names: [False] * len(names)


@breaks("away", "tiers.shared_l2")
def _(module) -> None:
    module.SharedL2Adapter.leave_alone = nothing


@breaks("settings", "launch.settings")
def _(module) -> None:
    module.Settings.load = classmethod(lambda cls, values: cls.model_construct(**values))


MODULES = {module for part, module in WAYS if part == PART}


def take_away(module) -> None:
    """When the module has been imported."""
    WAYS[PART, module.__name__](module)


def take_away_now() -> None:
    """What has to go before anything is imported."""
    if PART == "metrics":
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
