"""The index of a chunk store: room, age and pins, without files."""

from __future__ import annotations

import pytest

from lmcache_xpu.tiers.disk import chunk_index
from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo, disk_bytes
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex

PAYLOAD = 4096
SIZE = disk_bytes(PAYLOAD)


@pytest.fixture
def index() -> ChunkIndex:
    """Room for three entries; b is the oldest."""
    index = ChunkIndex(3 * SIZE, pin_seconds=60)
    for used_ns, key in enumerate("bca"):
        index.add(key, ChunkInfo("meta", PAYLOAD), used_ns)
    return index


def evicted(index: ChunkIndex, need_bytes: int, used_ns: int = 2**63) -> list[str]:
    keys = []
    for key in index.evict(need_bytes, used_ns):
        index.remove(key)
        keys.append(key)
    return keys


def test_the_oldest_go_first_and_no_more_than_must(index):
    assert evicted(index, SIZE) == ["b"]
    assert evicted(index, 2 * SIZE) == ["c"]
    assert index.used_bytes == SIZE


def test_what_was_used_later_is_not_evicted_for_an_older_one(index):
    assert evicted(index, 3 * SIZE, 1) == ["b", "c"]
    assert evicted(index, 3 * SIZE) == ["a"]


def test_a_use_before_the_store_counts_for_a_minute(index):
    index.mark("z", 10)
    assert index.planned("z", 20) == 10
    assert index.planned("z", 20) == 20
    index.mark("z", 10)
    assert index.planned("z", 10 + 60 * 10**9) == 10 + 60 * 10**9


def test_a_use_makes_an_entry_young(index):
    assert index.mark("b", 10)
    assert not index.mark("z", 10)
    assert evicted(index, SIZE) == ["c"]


@pytest.mark.parametrize("ahead", [0, 10**12])
def test_chunks_of_a_clock_that_was_ahead_keep_their_order(index, monkeypatch, ahead):
    monkeypatch.setattr(chunk_index.time, "time_ns", lambda: 10**18)
    index.clear()
    index.add_earlier(
        [(key, ChunkInfo("meta", PAYLOAD), 10**18 + ahead + n) for n, key in enumerate("zxy")]
    )
    assert evicted(index, 3 * SIZE) == ["z", "x", "y"]


def test_a_pinned_entry_stays_until_as_many_unpins(index):
    assert [index.pin("b"), index.pin("b")] == [True, True]
    assert evicted(index, SIZE) == ["c"]
    assert index.unpin("b")
    assert not index.can_fit(3 * SIZE)
    assert index.unpin("b")
    assert not index.unpin("b")
    assert index.can_fit(3 * SIZE)
    assert evicted(index, 3 * SIZE) == ["b", "a"]
    assert not index.pin("b")


def test_an_old_pin_protects_no_longer(index, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(chunk_index.time, "monotonic", lambda: now[0])
    index.pin("b")
    now[0] = 60.0
    assert not index.pinned("b")
    assert evicted(index, SIZE) == ["b"]


def test_what_is_reserved_is_not_given_twice(index):
    index.remove("a")
    index.reserve(SIZE)
    assert not index.fits(SIZE)
    index.reserve(-SIZE)
    assert index.fits(SIZE)
    assert index.reserved_bytes == 0


def test_whoever_watches_hears_of_what_is_there_and_of_each_change(index):
    heard = []
    index.watch(heard.append)
    assert sorted(heard) == ["a", "b", "c"]
    del heard[:]
    index.add("b", ChunkInfo("meta", PAYLOAD), 5)
    index.clear()
    assert heard[:2] == ["b", "b"]
    assert sorted(heard[2:]) == ["a", "b", "c"]
    assert (len(index), index.used_bytes) == (0, 0)
