"""A chunk store on real files: what comes back, and what its size allows."""

from __future__ import annotations

import errno

import pytest
from support.chunk_files import KIB, NO_LIMIT, file_of, files, load, payload, reopened

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk.chunk_file import disk_bytes
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore


def test_a_chunk_comes_back_with_its_meta(store):
    assert store.put("a", "meta of a", payload("a"))
    assert store.info("a") == ("meta of a", 3 * KIB)
    assert load(store, "a") == payload("a")
    assert load(store, "b") is None
    counters = store.counters
    assert (counters["hits"], counters["stored"], counters["bytes"]) == (1, 1, disk_bytes(3 * KIB))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 256 * KIB - 1, 256 * KIB + 1, 700 * KIB])
def test_any_size_survives_a_restart(store, size):
    store.put("a", "", payload("a", size))
    again = reopened(store)
    assert load(again, "a") == payload("a", size)
    again.close()


def test_payload_is_read_straight_into_the_callers_buffer(store):
    store.put("a", "", payload("a"))
    pool = bytearray(b"\xff" * 10 * KIB)
    assert store.read("a", memoryview(pool)[KIB : 4 * KIB])
    assert pool[KIB : 4 * KIB] == payload("a")
    assert set(pool[:KIB] + pool[4 * KIB :]) == {0xFF}


def test_a_buffer_of_another_length_is_a_miss_and_keeps_the_chunk(store):
    store.put("a", "", payload("a"))
    assert not store.read("a", memoryview(bytearray(KIB)))
    assert load(store, "a") == payload("a")


def test_only_the_owner_can_read(directory, store):
    store.put("a", "", payload("a"))
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in directory.iterdir()} == {0o600}


def test_an_existing_directory_is_closed_to_others(directory):
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    ChunkStore(directory, NO_LIMIT).close()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_key_and_meta_too_long_for_the_header_are_refused(store, directory):
    with pytest.raises(ValueError, match="4096"):
        store.put("k" * 4000, "m" * 200, b"x")
    assert files(directory) == []
    assert store.counters["dropped"] == 1


# Size


def test_a_chunk_that_is_there_is_not_counted_as_dropped(store):
    assert store.put("a", "", payload("a"))
    assert store.put("a", "", payload("a"))
    assert (store.counters["stored"], store.counters["dropped"]) == (1, 0)


def test_least_recently_used_goes_first(store):
    store._index.limit_bytes = 3 * disk_bytes(3 * KIB)
    for key in "abc":
        store.put(key, "", payload(key))
    store.touch(["a"])
    store.put("d", "", payload("d"))
    assert [key for key in "abcd" if key in store] == ["a", "c", "d"]
    assert store.counters["evicted"] == 1


def test_the_first_of_those_touched_together_stays_longest(store):
    for key in "abc":
        store.put(key, "", payload(key))
    store.touch(["a", "b", "c"])
    again = reopened(store, 2 * disk_bytes(3 * KIB))
    assert [key for key in "abc" if key in again] == ["a", "b"]
    again.close()


def test_files_of_earlier_runs_count(store):
    for key in "abcd":
        store.put(key, "", payload(key))
    store.touch(["a"])
    again = reopened(store, 3 * disk_bytes(3 * KIB))
    assert [key for key in "abcd" if key in again] == ["a", "c", "d"]
    again.put("e", "", payload("e"))
    assert [key for key in "abcde" if key in again] == ["a", "d", "e"]
    assert len(files(again.directory)) == 3
    again.close()


def test_a_disk_that_fails_as_it_is_listed_is_named_and_let_go(directory, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("os.scandir", fail)
        with pytest.raises(SettingsError, match="Input/output error"):
            ChunkStore(directory, NO_LIMIT)
    ChunkStore(directory, NO_LIMIT, lock_seconds=0).close()


def test_a_limit_of_zero_empties(store, directory):
    store.put("a", "", payload("a"))
    reopened(store, 0).close()
    assert files(directory) == []


class Between:
    """A lock; whenever it is given back, `run` comes next, as another thread might."""

    def __init__(self, lock, run):
        self._lock, self._run = lock, run

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()
        run, self._run = self._run, lambda: None  # not while it runs itself
        run()
        self._run = run


def test_a_chunk_that_was_just_written_is_not_counted_twice(directory):
    """Another put would evict for it, in a store that holds all of them."""
    store = ChunkStore(directory, 2 * disk_bytes(3 * KIB))

    def put_other():
        if store.info("a"):
            store.put("b", "", payload("b"))

    store._lock = Between(store._lock, put_other)
    store.put("a", "", payload("a"))
    assert store.counters["evicted"] == 0
    assert len(files(directory)) == 2
    store.close()


def test_a_chunk_above_the_limit_evicts_nothing(store):
    store._index.limit_bytes = 3 * disk_bytes(3 * KIB)
    store.put("a", "", payload("a"))
    assert not store.put("big", "", bytes(64 * KIB))
    assert "a" in store
    assert store.counters["dropped"] == 1


def test_what_is_removed_is_gone(store, directory):
    store.put("a", "A", payload("a"))
    store.put("b", "B", payload("b"))
    assert store.remove("a")
    assert files(directory) == [file_of(store, "b")]
    assert store.remove("b")
    assert not store.remove("b")
