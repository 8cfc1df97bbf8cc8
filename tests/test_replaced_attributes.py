"""What the data path sets on objects of others is a field of theirs, never a method or an index."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lmcache_xpu

SRC = Path(lmcache_xpu.__file__).parent
ROOMS = (
    "stock",
    "connector",
    "vllm_hooks",
    "copies",
    "server",
    "cache",
    "model",
    "gpu_connector",
    "tiers",
    "transfer",
)
REPLACING = {  # by `status` shown as patches; the last while an engine starts
    "vllm_hooks/patches.py: setattr(holder, name, replacement)",
    "vllm_hooks/worker_hooks.py: worker.__class__",
    # Of the cache's own storage manager alone, before anybody stores.
    "cache/room.py: self._memory.reserve_write",
    "stock/gpu_connectors.py: setattr(module, SEAM, make)",
    "stock/gpu_connectors.py: setattr(module, SEAM, original)",
}
FIELDS = {  # of a description, a configuration or a state, which hold plain data
    "stock/config.py: config.extra_config",
    "stock/config.py: config.pre_caching_hash_algorithm",
    "stock/config.py: transfer.kv_connector_extra_config",
    "gpu_connector/base.py: metadata.fmt",
    "stock/worker.py: forward_context.attn_metadata",
    "stock/worker.py: request.load_spec",
    "stock/worker.py: self.lmcache.device",
    "stock/worker.py: self.lmcache.layerwise_retrievers",
    # vLLM's scheduler reads where a step has to end, and what a failed load has left computed.
    "connector/hit_ends.py: request.shared_prefix_boundary",
    "vllm_hooks/scheduler.py: request.num_computed_tokens",
    "stock/gpu_connectors.py: metadata.kv_shape",
    "stock/gpu_connectors.py: metadata.model_name",
    # LMCache hands its server to a module for that, before it starts.
    "server/server_socket.py: entry.handler",
    "server/server_socket.py: server.socket",
    # Older LMCache can't round its chunks up to an engine's blocks, as newer does.
    "server/server_module.py: context._chunk_size",
    "server/server_module.py: context.token_hasher.chunk_size",
}
OWN = {  # of classes of this package, and of events that it makes
    "vllm_hooks/patches.py: replacement.__lmcache_xpu__",
    "connector/kv_events.py: event.block_hashes",
    "connector/kv_events.py: event.extra_keys",
    "connector/kv_events.py: event.token_ids",
    "connector/kv_events.py: tracked.described",
    "cache/local_cache.py: cache._users",
    "cache/local_client.py: lookup.handle",
    "cache/local_client.py: lookup.hit",
    "cache/local_client.py: lookup.in_memory",
    "cache/local_client.py: lookup.read_s",
    "cache/local_client.py: lookup.read_since",
    "cache/lookups.py: lookup.asked",
    "cache/lookups.py: lookup.hit_tokens",
    "cache/lookups.py: lookup.locks",
    "cache/lookups.py: lookup.since",
    "cache/lookups.py: lookup.waits",
    "cache/room.py: self._kept.keys",
    "connector/scheduler_half.py: tracked.most_stored",
    "connector/scheduler_half.py: self._keys.pool",
    "connector/scheduler_half.py: self.policy.loads",
    "connector/scheduler_half.py: tracked.has_blocks",
    "connector/scheduler_half.py: tracked.in_step",
    "copies/step_loads.py: load.located",
    "copies/step_loads.py: load.pipeline",
    "copies/step_loads.py: load.pipeline.states",
    "tiers/disk/chunk_store.py: index.reserved_bytes",
    "tiers/disk/chunk_store.py: self._index.reserved_bytes",
    "tiers/disk/chunk_index.py: entry.info",
    "tiers/disk/chunk_index.py: entry.key",
    "tiers/disk/chunk_index.py: entry.used_ns",
    "tiers/task_results.py: self._timer.daemon",
    "transfer/host_copies.py: memory.pinning",
}


def assigned(source: str) -> Iterator[str]:
    """Attributes that code sets on anything but the object whose method it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "setattr",
            "__setattr__",
            "delattr",
        ):
            yield ast.unparse(node)


def test_nothing_else_is_set_on_objects_of_others():
    seen = {
        f"{path.relative_to(SRC)}: {target}"
        for room in ROOMS
        for path in (SRC / room).rglob("*.py")
        for target in assigned(path.read_text())
    }
    assert seen == REPLACING | FIELDS | OWN, "replace nothing: extend the class (CONTRIBUTING.md)"


def test_every_way_to_set_one_is_seen():
    source = """
pool.hot_cache = watched(pool.hot_cache)
a, b.c = 1, 2
self.x = d.e = 3
setattr(f, "g", 1)
object.__setattr__(f, "g", 1)
del h.i
self.own = 4
"""
    assert set(assigned(source)) == {
        "pool.hot_cache",
        "b.c",
        "d.e",
        "setattr(f, 'g', 1)",
        "object.__setattr__(f, 'g', 1)",
        "h.i",
    }
