"""A clock that was ahead, or is set back: what was used last is still what stays."""

from __future__ import annotations

import time

import pytest
from support.chunk_files import KIB, payload, reopened

from lmcache_xpu.tiers.disk.chunk_file import disk_bytes
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

MONTH_NS = 30 * 86400 * 10**9
ROOM = 10


@pytest.fixture
def store(directory):
    store = ChunkStore(directory, ROOM * disk_bytes(3 * KIB))
    yield store
    store.close()


@pytest.fixture
def clock(monkeypatch):
    """Set the clock ahead, by nanoseconds."""
    real = time.time_ns
    return lambda ahead: monkeypatch.setattr(time, "time_ns", lambda: real() + ahead)


def put_prompt(store, name, chunks=5):
    """As the writer does: the first chunk counts as the last used."""
    now = store.now(chunks)
    for age in range(chunks):
        store.put(f"{name}{age}", "", payload(name), now - age)


def held(store, name, chunks=5):
    return [age for age in range(chunks) if f"{name}{age}" in store]


@pytest.mark.parametrize("restart", [True, False])
def test_a_clock_that_was_ahead_does_not_keep_what_was_stored_then(store, clock, restart):
    clock(MONTH_NS)
    put_prompt(store, "old", ROOM)
    clock(0)
    if restart:
        store = reopened(store, ROOM * disk_bytes(3 * KIB))
    put_prompt(store, "new")
    assert held(store, "new") == [0, 1, 2, 3, 4]
    assert held(store, "old", ROOM) == [0, 1, 2, 3, 4]
    store = reopened(store, ROOM * disk_bytes(3 * KIB))  # and the order outlives a restart
    put_prompt(store, "third")
    assert held(store, "new") == [0, 1, 2, 3, 4]
    assert held(store, "old", ROOM) == []
    store.close()


def test_a_time_to_come_counts_as_now(store):
    for number in range(ROOM):
        store.put(f"old{number}", "", payload(0), time.time_ns() + MONTH_NS)
    put_prompt(store, "new")
    assert held(store, "new") == [0, 1, 2, 3, 4]


def test_a_clock_that_stands_still_keeps_the_order(store, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    for name in ("a", "b", "c", "d"):
        put_prompt(store, name)
    assert [held(store, name) for name in "abcd"] == [[], [], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    store.touch([f"c{age}" for age in range(5)])
    put_prompt(store, "e", 4)
    assert [held(store, name) for name in "cd"] == [[0, 1, 2, 3, 4], [0]]
