"""The index of a chunk store: room and age, without files."""

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
    index = ChunkIndex(3 * SIZE)
    for used_ns, key in enumerate("bca"):
        index.add(key, ChunkInfo("meta", PAYLOAD), used_ns, key)
    return index


def evicted(index: ChunkIndex, need_bytes: int, used_ns: int = 2**63) -> list[str]:
    keys = []
    while not index.fits(need_bytes) and (oldest := index.oldest()) and oldest[0] <= used_ns:
        index.remove(oldest[1])
        keys.append(oldest[1])
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
    for key in "abc":
        index.remove(key)
    index.add_earlier([(10**18 + ahead + n, name, PAYLOAD) for n, name in enumerate("zxy")])
    assert index.used_bytes == 3 * SIZE
    assert evicted(index, 3 * SIZE) == ["z", "x", "y"]


def test_what_is_reserved_is_not_given_twice(index):
    index.remove("a")
    index.reserved_bytes += SIZE
    assert not index.fits(SIZE)
    index.reserved_bytes -= SIZE
    assert index.fits(SIZE)


def test_whoever_watches_hears_of_what_is_there_and_of_each_change(index):
    heard = []
    index.watch(heard.append)
    assert sorted(heard) == ["a", "b", "c"]
    del heard[:]
    index.add("b", ChunkInfo("meta", PAYLOAD), 5, "b")
    index.remove("c")
    index.remove("c")
    assert heard == ["b", "b", "c"]
    assert (len(index), index.used_bytes) == (2, 2 * SIZE)


def test_what_an_earlier_run_left_is_heard_of_once_it_has_a_key(index):
    heard = []
    index.watch(heard.append)
    del heard[:]
    index.add_earlier([(1, "name of d", PAYLOAD), (2, "name of e", PAYLOAD)])
    index.identify("name of d", "d", ChunkInfo("meta", PAYLOAD))
    assert index.get("name of d").info.meta == "meta"
    index.remove("name of e")
    index.remove("name of d")
    assert heard == ["d", "d"]


def test_files_of_an_earlier_run_count_before_anybody_asks_for_them(index):
    index.add_earlier([(0, "name of d", PAYLOAD), (10, "name of e", PAYLOAD)])
    assert (len(index), index.used_bytes) == (5, 5 * SIZE)
    assert "name of e" in index
    assert sorted(index.names()) == ["a", "b", "c", "name of d", "name of e"]
    assert index.mark("name of d", 11)
    assert evicted(index, 0) == ["b", "c"]
    assert evicted(index, 2 * SIZE) == ["a", "name of e"]
    assert (index.names(), index.used_bytes) == (["name of d"], SIZE)


def test_of_an_earlier_run_a_file_larger_than_the_room_goes_first(index):
    index.add_earlier([(10**18, "large", 4 * SIZE), (-1, "small", PAYLOAD)])
    assert evicted(index, 0) == ["small", "b", "large"]


def test_a_name_is_always_here_while_its_entry_is_made(index):
    """Whether a name is here is asked without a lock, by threads that others interrupt."""

    class Interrupted(dict):
        def __contains__(self, name):
            answer = super().__contains__(name)
            index.get(name)
            return answer

        def __delitem__(self, name):
            super().__delitem__(name)
            assert name in index

    index._entries, index._earlier = Interrupted(index._entries), Interrupted()
    index.add_earlier([(0, "name of d", PAYLOAD)])
    assert "name of d" in index
    assert "name of d" in index
