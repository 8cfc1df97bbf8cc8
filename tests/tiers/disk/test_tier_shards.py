"""A disk that was filled with one TP size is hit with another one: the same bytes, or nothing."""

from __future__ import annotations

import os
import threading
from itertools import permutations

import pytest
import torch
from support.chunk_files import file_of
from support.shards import NUMBERS, SIZES, fill, load, part, rank_keys, rank_metadata, store

from lmcache_xpu.tiers.disk import chunk_directory, neighbours
from lmcache_xpu.tiers.disk.chunk_file import disk_bytes

PAIRS = list(permutations(SIZES, 2))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_size_finds_the_chunks_of_each_other(ranks, before, after):
    fill(ranks(before))
    for number, engine in enumerate(ranks(after)):
        assert load(engine, number, after, [*NUMBERS, 9]) == (5, list(NUMBERS))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_torch_copies_nothing_in_the_reader_threads(ranks, monkeypatch, before, after):
    """In a forked rank, several first copies at once could fail; see tiers/shard.py."""
    copy = torch.Tensor.copy_

    def in_main_thread(*args, **options):
        assert threading.current_thread() is threading.main_thread()
        return copy(*args, **options)

    fill(ranks(before))
    monkeypatch.setattr(torch.Tensor, "copy_", in_main_thread)
    for number, engine in enumerate(ranks(after)):
        assert load(engine, number, after) == (5, list(NUMBERS))


def test_the_chunks_of_a_size_are_there_when_it_comes_back(ranks):
    fill(ranks(4))
    for size in (2, 1, 2, 4):
        opened = ranks(size)
        for number, engine in enumerate(opened):
            assert load(engine, number, size) == (5, list(NUMBERS))
        for engine in opened:
            engine.close()


def test_chunks_of_several_sizes_make_one_prefix(ranks):
    fill(ranks(1), range(3))
    fill(ranks(4), range(3, 6))
    opened = ranks(2)
    for number, engine in enumerate(opened):
        store(engine, number, 2, range(6, 8))
        assert load(engine, number, 2, range(9)) == (8, list(range(8)))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
@pytest.mark.parametrize("damage", ["truncate", "flip", "swap"])
def test_a_damaged_slice_is_a_miss(ranks, tmp_path, before, after, damage):
    opened = ranks(before)
    last = opened[-1].tier
    file, other = (
        file_of(last._store, last._holdings.name(key))
        for key in rank_keys(before - 1, before, (2, 3))
    )
    fill(opened)
    raw = bytearray(file.read_bytes())
    match damage:
        case "truncate":
            os.truncate(file, 6000)
        case "flip":
            raw[-5] ^= 4
            file.write_bytes(raw)
        case "swap":
            file.write_bytes(other.read_bytes())
    for number, engine in enumerate(ranks(after)):
        whole = before > after and number == 0  # it needs the other slices
        promised, loaded = load(engine, number, after)
        assert loaded == (list(NUMBERS) if whole else [0, 1])
        assert promised >= len(loaded)
        # Each learns of it once.
        assert load(engine, number, after) == ((5, list(NUMBERS)) if whole else (2, [0, 1]))


def test_a_part_of_the_slices_is_a_miss(ranks):
    opened = ranks(4)
    for number, engine in enumerate(opened):
        store(engine, number, 4, range(2 if number == 3 else 5))
    for engine in opened:
        engine.close()
    first, second = ranks(2)
    assert load(first, 0, 2) == (5, list(NUMBERS))
    assert load(second, 1, 2) == (2, [0, 1])
    first.close()
    second.close()
    assert load(ranks(1)[0], 0, 1) == (2, [0, 1])


def test_chunks_that_other_sizes_left_stay_within_the_size(ranks, tmp_path):
    """The last used ones of all ranks."""
    fill(ranks(2))
    limit = 4 * disk_bytes(part(0, 0, 2).nbytes)
    (alone,) = ranks(1, **{"disk.gib": limit / 2**30})
    files = list((tmp_path / "kv").glob("*/*.lmxkv"))
    assert alone.tier.counters.bytes <= limit
    assert sum(file.stat().st_size for file in files) <= limit
    assert len(files) == 4


def test_a_chunk_made_of_others_is_kept_between_look_up_and_load(ranks):
    """For another rank, too, that reads it from this one's directory."""
    fill(ranks(1))
    size = disk_bytes(part(0, 0, 1).nbytes)
    first, second = ranks(2, **{"disk.gib": 5 * size / 2**30})
    keys = rank_keys(0, 2, NUMBERS)
    assert first.manager.batched_contains(keys, pin=True)[0] == 5
    store(first, 0, 2, range(10, 30))  # no room for any
    assert load(second, 1, 2) == (5, list(NUMBERS))
    for key in keys:
        assert first.tier.contains(key)
        assert first.tier.unpin(key)
        assert not first.tier.unpin(key)
    store(first, 0, 2, range(10, 30))
    assert load(first, 0, 2)[0] < 5


def test_what_another_rank_has_evicted_fails_the_load_alone(ranks):
    fill(ranks(1))
    first, second = ranks(2)
    keys = rank_keys(1, 2, NUMBERS)
    assert second.manager.batched_contains(keys, pin=True)[0] == 5
    first.tier._store.clear()
    assert second.manager.batched_get(keys, location="disk") == [None] * 5
    assert load(second, 1, 2) == (0, [])


def test_the_chunks_made_of_are_marked_as_used(ranks):
    fill(ranks(1))
    (engine, _) = ranks(2)
    assert load(engine, 0, 2, [3]) == (1, [3])
    names = [engine.tier._store._index.get(each) for each in engine.tier._store._index]
    assert len({entry.used_ns for entry in names}) == 5
    engine.tier._store._index.limit_bytes = 1 * disk_bytes(part(0, 0, 1).nbytes)
    engine.tier._store._make_room(0)
    assert load(engine, 0, 2, [3]) == (1, [3])


@pytest.mark.parametrize("heads", [6, 3])
def test_heads_that_do_not_divide_are_found_by_their_own_size_alone(ranks, heads):
    fill(ranks(3, heads=heads), heads=heads)
    (alone,) = ranks(1, heads=heads)
    assert load(alone, 0, 1, heads=heads) == (0, [])
    alone.close()
    for number, engine in enumerate(ranks(3, heads=heads)):
        assert load(engine, number, 3, heads=heads) == (5, list(NUMBERS))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_blocks_of_an_order_of_their_own_are_not_found(ranks, before, after):
    fill(ranks(before, divisible=False))
    for number, engine in enumerate(ranks(after, divisible=False)):
        assert load(engine, number, after) == (0, [])


def test_another_model_or_layout_is_not_found(ranks, engines):
    fill(ranks(1))
    metadata = rank_metadata(0, 2)
    metadata.model_name = "b/model"
    other = engines(metadata=metadata)
    keys = [
        key.__class__(**{**vars_of(key), "model_name": "b/model"})
        for key in rank_keys(0, 2, NUMBERS)
    ]
    assert other.manager.batched_contains(keys)[0] == 0
    other.close()
    metadata = rank_metadata(0, 2)
    metadata.kv_shape = (*metadata.kv_shape[:4], 128)
    assert engines(metadata=metadata).manager.batched_contains(rank_keys(0, 2, NUMBERS))[0] == 0


def vars_of(key):
    names = ("world_size", "worker_id", "chunk_hash", "dtype")
    return {name: getattr(key, name) for name in names}


def test_a_look_up_asks_the_disk_only_for_what_other_sizes_left(ranks, monkeypatch):
    """Nothing of another size: no system call. Else one for each chunk that is there."""
    asked = []
    file = neighbours.ChunkDirectory.file

    def counted(directory, key):
        asked.append(key)
        return file(directory, key)

    monkeypatch.setattr(chunk_directory.ChunkDirectory, "file", counted)
    opened = ranks(4)
    for number, engine in enumerate(opened):
        asked.clear()
        assert load(engine, number, 4) == (0, [])
        assert asked == []
    fill(opened)
    for number, engine in enumerate(ranks(2)):
        asked.clear()
        keys = rank_keys(number, 2, [*NUMBERS, 9, 10])
        assert engine.manager.batched_contains(keys)[0] == 5
        assert len(asked) <= 5 * 2 * 3  # slices, and directories that they may be in
