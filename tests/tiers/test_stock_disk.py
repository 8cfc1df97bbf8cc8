"""The disk tier in LMCache's own StorageManager: what comes back, is a miss, is kept."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from support.storage import (
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    SHAPE,
    TOKENS,
    content,
    make_key,
    make_metadata,
)

from lmcache_xpu.tiers.stock_disk import DiskTier

# Round trip


def test_lmcache_creates_the_tier_and_gets_its_chunks_back(engines):
    engine = engines()
    assert isinstance(engine.tier, DiskTier)
    engine.store(range(5))
    assert engine.load(range(5)) == [0, 1, 2, 3, 4]
    assert engine.pool_in_use == 0
    counters = engine.counters
    assert (counters["stored"], counters["hits"], counters["bytes"]) == (5, 5, 5 * (CHUNK + 4096))


def test_chunks_are_found_after_a_restart(engines):
    first = engines()
    first.store(range(5))
    first.close()
    second = engines()
    assert second.manager.batched_contains([make_key(n) for n in range(6)])[0] == 5
    assert second.load(range(5)) == [0, 1, 2, 3, 4]


def test_loaded_chunks_go_to_the_hot_cache(engines):
    engine = engines(hot=True)
    engine.store(range(3))
    engine.pool.clear()
    assert engine.manager.contains(make_key(0)) == "disk"
    assert engine.load(range(3)) == [0, 1, 2]
    assert engine.manager.contains(make_key(0)) == "LocalCPUBackend"
    assert engine.pool_in_use == 3 * CHUNK
    assert all(engine.pool.hot_cache[make_key(n)].get_ref_count() == 1 for n in range(3))
    engine.pool.clear()


@pytest.mark.parametrize(
    ("shape", "fmt"),
    [
        (SHAPE, MemoryFormat.KV_2LTD),
        (torch.Size([2, LAYERS, 5, HEADS * DIM]), MemoryFormat.KV_2LTD),  # not a full chunk
        (torch.Size([1, LAYERS, TOKENS, 72]), MemoryFormat.KV_MLA_FMT),
        (torch.Size([TOKENS, 2, HEADS * DIM]), MemoryFormat.KV_T2D),
    ],
)
def test_shape_and_format_survive(engines, shape, fmt):
    first = engines()
    obj = first.allocate(content(1, shape), shape, fmt)
    first.manager.batched_put([make_key(1)], [obj])
    first.settle()
    first.close()
    loaded = engines().tier.get_blocking(make_key(1))
    assert torch.equal(loaded.tensor, content(1, shape))
    assert loaded.meta.fmt is fmt
    assert loaded.get_num_tokens() == shape[fmt.token_dim()]
    assert loaded.get_ref_count() == 1
    loaded.ref_count_down()


@pytest.mark.parametrize(
    "other",
    [
        make_key(0, model_name="another/model"),
        make_key(0, world_size=2),
        make_key(0, worker_id=1),
        make_key(0, dtype=torch.float16),
        make_key(0).get_first_layer(),
    ],
)
def test_a_key_is_all_of_its_parts(engines, other):
    engine = engines()
    engine.store([0])
    assert engine.tier.contains(make_key(0))
    assert not engine.tier.contains(other)


def test_the_name_of_a_chunk_and_of_one_layer(engines):
    """Files of earlier versions are found by these."""
    tier, key = engines().tier, make_key(0xABC)
    origin, chunk = "cpu@(2, 2, 16, 2, 64)", f"1@0@{key.chunk_hash_hex}@torch.bfloat16"
    assert tier.name(key) == f"{origin}@{chunk}@-@a/model\n"
    assert tier.name(key.split_layers(2)[1]) == f"{origin}@{chunk}@1@a/model\n"


def test_another_shape_of_the_model_does_not_find_the_chunks(engines):
    first = engines()
    first.store([0])
    first.close()
    deeper = replace(make_metadata(), kv_shape=(LAYERS + 1, 2, TOKENS, HEADS, DIM))
    assert engines(metadata=deeper).load([0]) == []


# Misses and damage


def test_none_from_the_first_miss_on(engines):
    engine = engines()
    engine.store([0, 1, 3])
    objs = engine.manager.batched_get([make_key(n) for n in range(4)], location="disk")
    assert [obj is not None for obj in objs] == [True, True, False, False]
    for obj in objs[:2]:
        obj.ref_count_down()
    assert engine.tier.get_blocking(make_key(9)) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "delete", "swap"])
def test_damage_is_a_miss_and_never_wrong_bytes(engines, damage):
    engine = engines()
    engine.store(range(4))
    path = engine.file(2)
    raw = bytearray(path.read_bytes())
    match damage:
        case "truncate":
            os.truncate(path, 6000)
        case "flip":
            raw[9000] ^= 4
            path.write_bytes(raw)
        case "foreign":
            path.write_bytes(b"something else")
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes(engine.file(3).read_bytes())
    assert engine.load(range(4)) == [0, 1]
    assert engine.pool_in_use == 0
    assert not engine.tier.contains(make_key(2))
    engine.store([2])  # and it can be stored anew
    assert engine.load(range(4)) == [0, 1, 2, 3]


def test_a_chunk_lost_after_its_look_up_is_a_miss(engines):
    engine = engines()
    key = engine.store([0])[0]
    assert engine.manager.batched_contains([key], pin=True)[0] == 1
    engine.file(0).unlink()
    assert engine.load([0]) == []
    engine.manager.batched_unpin([key], ["disk"])
    assert not engine.tier.contains(key)


def test_a_pool_smaller_than_the_request(engines, log):
    first = engines()
    first.store(range(8))
    first.close()
    engine = engines(pool_chunks=5)
    objs = engine.manager.batched_get([make_key(n) for n in range(8)], location="disk")
    assert [obj is not None for obj in objs] == [True] * 5 + [False] * 3
    for obj in objs[:5]:
        obj.ref_count_down()
    assert [line for line in log if "CPU pool" in line] != []


# Size


def test_the_size_holds_and_counts_earlier_runs(engines, tmp_path):
    first = engines(chunks=10)
    first.store(range(10))
    first.close()
    engine = engines(chunks=10)
    engine.store(range(10, 14))
    files = list((tmp_path / "kv" / "kv-worker-0").glob("*.lmxkv"))
    assert len(files) == 10
    assert engine.counters["evicted"] == 4
    # Of one batch the end goes first: it is of no use without the beginning.
    assert engine.load(range(6)) == [0, 1, 2, 3, 4, 5]
    assert [n for n in range(10) if engine.tier.contains(make_key(n))] == [0, 1, 2, 3, 4, 5]


def test_remove(engines):
    engine = engines()
    keys = engine.store(range(2))
    assert engine.manager.remove(keys[0], ["disk"]) == 1
    assert engine.manager.remove(keys[0], ["disk"]) == 0
    assert engine.load([1]) == [1]
