"""Tiers in LMCache's own StorageManager tell of each chunk that comes or goes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache_xpu.cache_engine.health import watch_tiers
from support.chunk_files import file_of
from support.servers import needs_server
from support.storage import LAYER_SHAPE, LAYERS, Engine, make_key

from lmcache_xpu.tiers.residency import CPU, DISK, SHARED, Change, Residency, chunk_name


def watch(manager, layers: int = 1) -> Residency:
    engine = SimpleNamespace(storage_manager=manager, num_layers=layers, use_layerwise=layers > 1)
    return watch_tiers(engine)


def held(changes: list[Change], state: dict[str, set[int]] | None = None) -> dict[str, set[int]]:
    """Numbers of chunks by tier, after these changes; each must be one."""
    state = state if state is not None else {CPU: set(), DISK: set(), SHARED: set()}
    for tier, chunk, is_held in changes:
        assert (int(chunk, 16) in state[tier]) is not is_held
        (state[tier].add if is_held else state[tier].remove)(int(chunk, 16))
    return state


def in_pool(engine: Engine) -> set[int]:
    return {key.chunk_hash for key in engine.pool.hot_cache}


def on_disk(engine: Engine, numbers: range) -> set[int]:
    return {n for n in numbers if engine.tier.contains(make_key(n))}


def test_what_is_stored_and_what_has_to_go(engines):
    engine = engines(hot=True, pool_chunks=6, chunks=4)
    residency = watch(engine.manager)
    engine.store(range(3))
    state = held(residency.take())
    assert (state[CPU], state[DISK]) == ({0, 1, 2}, {0, 1, 2})
    for number in range(3, 12):
        engine.store([number])
    state = held(residency.take(), state)
    assert state[CPU] == in_pool(engine) != set(range(12))
    assert state[DISK] == on_disk(engine, range(12)) != set(range(12))
    engine.pool.clear()
    engine.tier.clear()
    assert held(residency.take(), state) == {CPU: set(), DISK: set(), SHARED: set()}


def test_a_load_from_disk_is_in_memory_too_and_a_damaged_file_nowhere(engines):
    engine = engines(hot=True)
    residency = watch(engine.manager)
    engine.store(range(2))
    engine.pool.clear()
    state = held(residency.take())
    assert state[CPU] == set()
    assert engine.load([0]) == [0]
    path = file_of(engine.tier._store, engine.tier._holdings.name(make_key(1)))
    path.write_bytes(b"damaged")
    assert engine.load([1]) == []
    state = held(residency.take(), state)
    assert (state[CPU], state[DISK]) == ({0}, {0})
    engine.pool.clear()


def test_a_restart_tells_what_the_disk_holds(engines):
    first = engines()
    first.store(range(3))
    first.close()
    second = engines()
    assert held(watch(second.manager).take())[DISK] == {0, 1, 2}


def test_layers_of_a_chunk_come_and_go_together(engines):
    engine = engines(hot=True, pool_chunks=4)
    residency = watch(engine.manager, LAYERS)
    state = {CPU: set(), DISK: set(), SHARED: set()}
    for number in range(8):  # LMCache evicts by another way than for whole chunks
        objs = engine.manager.batched_allocate(
            LAYER_SHAPE, torch.bfloat16, LAYERS, fmt=MemoryFormat.KV_T2D, busy_loop=False
        )
        engine.manager.batched_put(make_key(number).split_layers(LAYERS), objs)
        engine.settle()
    held(residency.take(), state)
    assert state[CPU] == in_pool(engine) != set(range(8))
    assert state[DISK] == set(range(8))
    engine.tier.remove(make_key(5).split_layers(LAYERS)[1])
    assert held(residency.take(), state)[DISK] == set(range(8)) - {5}
    engine.pool.clear()
    engine.lent.clear()  # LMCache frees what it evicts so without giving up its reference


@needs_server
def test_a_server_tells_what_it_has_when_it_is_asked(engine, server):
    first, second = engines = engine(), engine()
    nearer, farther = (watch(each.manager) for each in engines)
    first.store(range(3))
    state = held(nearer.take())
    assert state[SHARED] == {0, 1, 2}
    assert second.found(range(5)) == 3
    assert held(farther.take())[SHARED] == {0, 1, 2}
    server.client.flushall()  # it tells nobody what it evicts
    assert first.found(range(3)) == 0
    assert held(nearer.take(), state)[SHARED] == set()
    assert second.load(0) is None
    assert farther.take() == [Change(SHARED, "0", False)]
    for each in engines:
        each.manager.storage_backends["LocalCPUBackend"].clear()


def test_a_chunks_name_is_the_one_of_lmcaches_keys():
    for number in (0x5EED, b"\x01\xff"):
        key = make_key(number, dtype=torch.bfloat16)
        assert chunk_name(number) == key.chunk_hash_hex
