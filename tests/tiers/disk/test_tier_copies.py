"""What ranks hold alike is on disk once, written by the first of them and read by all."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from support.shards import NUMBERS, fill, load, part, rank_keys, rank_metadata, store
from support.storage import LAYERS, TOKENS, content

from lmcache_xpu.tiers.disk import chunk_directory
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, disk_bytes
from lmcache_xpu.tiers.residency import DISK, Residency
from lmcache_xpu.tiers.shard import Shard, ShardedMetadata

LATENT = torch.Size([1, LAYERS, TOKENS, 72])


def files(path):
    return sorted((path / "kv").glob("*/*.lmxkv"))


def owners(path):
    return sorted({file.parent.name for file in files(path)})


@pytest.mark.parametrize(("size", "heads"), [(2, 1), (4, 1), (4, 2), (8, 2)])
def test_each_rank_loads_what_the_first_of_its_group_wrote(ranks, tmp_path, size, heads):
    opened = ranks(size, heads=heads)
    for number, engine in enumerate(opened):
        store(engine, number, size, NUMBERS, heads)
    for number, engine in enumerate(opened):
        assert load(engine, number, size, [*NUMBERS, 9], heads) == (5, list(NUMBERS))
    each = size // heads
    assert owners(tmp_path) == [f"kv-worker-{number}" for number in range(0, size, each)]
    unique = sum(part(n, r, size, heads).nbytes for n in NUMBERS for r in range(0, size, each))
    stored = sum(file.stat().st_size - HEADER_BYTES for file in files(tmp_path))
    assert stored == unique


def test_what_is_written_later_is_found_by_all(ranks):
    first, second = ranks(2, heads=1)
    assert load(second, 1, 2, heads=1) == (0, [])
    for upto in (1, 3, 5):
        store(first, 0, 2, range(upto), heads=1)
        assert load(second, 1, 2, heads=1) == (upto, list(range(upto)))
    first.tier._store.clear()
    assert load(second, 1, 2, heads=1) == (0, [])


def test_a_restart_finds_it(ranks):
    fill(ranks(4, heads=2), heads=2)
    for number, engine in enumerate(ranks(4, heads=2)):
        assert load(engine, number, 4, heads=2) == (5, list(NUMBERS))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 1), (8, 2)])
def test_other_sizes_find_it(ranks, before, after):
    """With two heads: of one rank both, of two one each, of more the same in several."""
    fill(ranks(before, heads=2), heads=2)
    for number, engine in enumerate(ranks(after, heads=2)):
        assert load(engine, number, after, heads=2) == (5, list(NUMBERS))


def latent(engine, number, size, numbers):
    keys = rank_keys(number, size, numbers)
    objs = [engine.allocate(content(n, LATENT), LATENT, MemoryFormat.KV_MLA_FMT) for n in numbers]
    engine.manager.batched_put(keys, objs)
    engine.settle()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_a_latent_is_one_for_all_sizes(engines, tmp_path, before, after):
    def ranks(size):
        for number in range(size):
            metadata = rank_metadata(number, size, 1, divisible=False)
            metadata.use_mla, metadata.kv_shape = True, (LAYERS, 1, TOKENS, 1, 72)
            yield number, engines(metadata=metadata)

    for number, engine in list(ranks(before)):
        latent(engine, number, before, NUMBERS)
        engine.close()
    assert len(files(tmp_path)) == 5
    for number, engine in list(ranks(after)):
        keys = rank_keys(number, after, NUMBERS)
        assert engine.manager.batched_contains(keys)[0] == 5
        for each, obj in zip(NUMBERS, engine.manager.batched_get(keys, "disk"), strict=True):
            assert torch.equal(obj.tensor, content(each, LATENT))
            assert obj.meta.fmt is MemoryFormat.KV_MLA_FMT
            obj.ref_count_down()


def of_before(number, size):
    """As versions described a rank that kept a copy for each."""
    shard = Shard(count=size, number=number)
    return ShardedMetadata.of(rank_metadata(number, size, 1), shard)


def test_the_copies_of_each_rank_of_before_are_found_by_it(ranks, engines, tmp_path):
    for number in range(2):
        engine = engines(metadata=of_before(number, 2))
        store(engine, number, 2, NUMBERS, heads=1)
        engine.close()
    assert len(files(tmp_path)) == 10
    opened = ranks(2, heads=1)
    for number, engine in enumerate(opened):
        assert load(engine, number, 2, heads=1) == (5, list(NUMBERS))
        store(engine, number, 2, range(5, 8), heads=1)
        assert load(engine, number, 2, range(8), heads=1) == (8, list(range(8)))
    assert len(files(tmp_path)) == 13


@pytest.mark.parametrize("reader", [0, 1])
def test_a_damaged_file_is_a_miss_for_all_and_heals(ranks, tmp_path, reader):
    """Whoever reads it removes it, and the rank that writes writes it again."""
    opened = ranks(2, heads=1)
    store(opened[0], 0, 2, [0], heads=1)
    [file] = files(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert load(opened[reader], reader, 2, [0], heads=1) == (1, [])
    assert files(tmp_path) == []
    assert load(opened[1 - reader], 1 - reader, 2, [0], heads=1)[1] == []
    store(opened[0], 0, 2, [0], heads=1)
    for number, engine in enumerate(opened):
        assert load(engine, number, 2, [0], heads=1) == (1, [0])


def test_a_look_up_asks_once_for_each_chunk_and_for_all_names_of_one(ranks, monkeypatch):
    opened = ranks(2, heads=1)
    store(opened[0], 0, 2, NUMBERS, heads=1)
    asked = []
    file = chunk_directory.ChunkDirectory.file

    def counted(directory, key):
        asked.append(key)
        return file(directory, key)

    monkeypatch.setattr(chunk_directory.ChunkDirectory, "file", counted)
    assert opened[1].manager.batched_contains(rank_keys(1, 2, range(50)))[0] == 5
    assert len(asked) <= 5 + 3  # by all of its names
    asked.clear()
    assert opened[0].manager.batched_contains(rank_keys(0, 2, range(50)))[0] == 5
    assert asked == []


def test_what_is_read_while_its_rank_evicts_is_right_or_a_miss(ranks, log):
    """Room for three chunks, of which more are written all the time."""
    limit = 3 * disk_bytes(part(0, 0, 2, 1).nbytes)
    first, second = ranks(2, heads=1, **{"disk.gib": limit / 2**30})
    ended, loads = threading.Event(), []

    def write():
        for number in range(300):
            store(first, 0, 2, [number % 7], heads=1)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        numbers = random.sample(range(7), 3)
        loads.append(load(second, 1, 2, numbers, heads=1))  # compares every byte
    writer.join()
    assert any(loaded for _, loaded in loads)
    assert any(len(loaded) < 3 for _, loaded in loads)
    assert first.tier.counters.evicted > 100
    assert first.tier.counters.corrupt == 0
    assert "Removed" not in "".join(log)
