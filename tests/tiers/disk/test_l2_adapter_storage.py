"""The disk tier under LMCache's own StorageManager, with the controllers that the server runs."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from support.chunk_files import file_of
from support.server_disk import Storage, make_key
from support.until import until

from lmcache_xpu.tiers.chunk_layout import object_name
from lmcache_xpu.tiers.disk import chunk_file


@pytest.fixture
def storages(tmp_path):
    opened = []

    def start(**settings):
        opened.append(Storage(settings.pop("path", tmp_path / "kv"), **settings))
        return opened[-1]

    yield start
    for storage in opened:
        storage.close()


def test_what_l1_lost_comes_from_the_disk(storages):
    storage = storages()
    storage.store(range(5))
    storage.clear()
    assert storage.hit(range(7)) == 5
    assert storage.tier.report_status()["hits"] == 5
    assert storage.manager.memcheck()


def test_a_restart_finds_it(storages):
    first = storages()
    first.store(range(5))
    first.close()
    second = storages()
    assert second.hit(range(7)) == 5


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_hit_ends_before_a_damaged_file_which_is_stored_again(storages, damage):
    storage = storages()
    storage.store(range(5))
    storage.clear()
    path = file_of(storage.tier._store, object_name(make_key(2)))
    raw = bytearray(path.read_bytes())
    match damage:
        case "flip":
            raw[5000] ^= 1
            path.write_bytes(raw)
        case "truncate":
            path.write_bytes(raw[:5000])
        case "delete":
            path.unlink()
    assert storage.hit(range(5)) == 2
    assert not path.exists()
    storage.clear()
    assert storage.hit(range(5)) == 2  # and is not even tried
    storage.store([2])  # as the engine does, once it has computed it
    storage.clear()
    assert storage.hit(range(5)) == 5
    assert storage.tier.report_status()["misses"] == 1


def test_more_than_fits_keeps_the_bound_and_what_is_left_is_right(storages):
    storage = storages(files=8)
    for first in range(0, 40, 4):
        storage.store(range(first, first + 4))
        storage.clear()
        status = storage.tier.report_status()
        assert status["bytes"] <= status["limit_bytes"]
    assert storage.hit(range(36, 40)) == 4
    assert storage.hit(range(4)) == 0
    assert storage.tier.report_status()["evicted"] == 32


def test_a_full_disk_costs_hits_and_nothing_else(storages, monkeypatch):
    storage = storages()
    storage.store([0])

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "write", fail)
        storage.store([1, 2], wait=False)
        until(lambda: storage.tier.report_status()["errors"] == 2)
        assert storage.hit(range(3)) == 3  # L1 has them
        storage.clear()
        assert storage.hit(range(3)) == 1
    storage.store([1, 2])
    storage.clear()
    assert storage.hit(range(3)) == 3
    assert storage.manager.memcheck()


def test_l1_emptied_by_force_during_writes_stores_no_wrong_byte(storages, monkeypatch):
    """LMCache frees memory that is being stored, and gives it to others."""
    storage = storages(threads=2)
    reached, go_on = threading.Event(), threading.Event()
    write = os.write

    def held_up(*args):
        reached.set()
        assert go_on.wait(10)
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "write", held_up)
        storage.store([0], wait=False)
        assert reached.wait(10)
        storage.manager.clear(force=True)
        storage.store([1], wait=False)  # in the same memory
        go_on.set()
        until(lambda: storage.tier.report_status()["stored"] == 1)
    storage.clear()
    assert storage.hit([0]) == 0
    assert storage.hit([1]) == 1


def test_l1_emptied_by_force_during_loads_spoils_no_other_object(storages, monkeypatch):
    storage = storages()
    storage.store([0])
    storage.clear()
    reached, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def held_up(*args):
        reached.set()
        assert go_on.wait(10)
        return preadv(*args)

    hits = []
    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "preadv", held_up)
        asking = threading.Thread(target=lambda: hits.append(storage.hit([0])))
        asking.start()
        assert reached.wait(10)
        storage.manager.clear(force=True)
        storage.store([1], wait=False)  # in the same memory
        go_on.set()
        asking.join()
    assert hits == [0]
    assert storage.hit([1]) == 1  # from L1, its bytes compared
    storage.clear()
    assert storage.hit([0]) == 1  # the file was not at fault


def test_an_end_under_load_leaves_only_whole_files(storages):
    first = storages(threads=1)
    for n in range(0, 40, 4):
        first.store(range(n, n + 4), wait=False)
    first.close()
    second = storages()
    for n in range(40):
        second.hit([n])  # compares bytes
    assert second.tier.report_status()["corrupt"] == 0


def test_of_what_lmcache_converts_nothing_is_found(storages):
    storage = storages(serde={"type": "fp8"})
    storage.store([0], wait=False)
    until(lambda: storage.tier.report_status()["stored"])
    storage.clear()
    assert storage.hit([0]) == 0
