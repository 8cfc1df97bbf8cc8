"""The disk tier in LMCache's server: damaged files, failing disks, memory that is taken back."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch
from support.server_disk import FILE, content, make_key

from lmcache_xpu.tiers.disk import chunk_file


@pytest.mark.parametrize("damage", ["flip", "truncate", "foreign", "delete", "swap"])
def test_damage_is_a_miss_and_is_stored_again(adapters, damage):
    adapter = adapters()
    adapter.store(range(4))
    path = adapter.file(2)
    raw = bytearray(path.read_bytes())
    match damage:
        case "flip":
            raw[-1] ^= 1
            path.write_bytes(raw)
        case "truncate":
            path.write_bytes(raw[:-1])
        case "foreign":
            path.write_bytes(os.urandom(len(raw)))
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes(adapter.file(3).read_bytes())
    assert adapter.load(range(4)) == [0, 1, 3]
    assert not path.exists()
    assert adapter.look_up(range(4)) == [0, 1, 3]
    counters = adapter.store_.counters
    assert (counters["corrupt"], counters["misses"]) == (int(damage != "delete"), 1)
    assert counters["bytes"] == 3 * FILE
    assert adapter.store([2]).is_successful()
    assert adapter.restarted(adapters).load(range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_costs_the_store(adapters, monkeypatch, code, log):
    adapter = adapters()
    adapter.store([0])

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "write", fail)
        assert not adapter.store([1, 2]).is_successful()
    assert [line for line in log if "could not be stored" in line]
    assert adapter.load([0, 1, 2]) == [0]
    assert adapter.store([1, 2]).is_successful()  # once there is room
    assert adapter.load([0, 1, 2]) == [0, 1, 2]


def test_a_disk_that_gives_nothing_costs_the_hit(adapters, monkeypatch):
    adapter = adapters()
    adapter.store([0, 1])

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "preadv", fail)
        assert adapter.load([0, 1]) == []
    assert adapter.store_.counters["errors"] == 2
    assert adapter.store([0, 1]).is_successful()
    assert adapter.load([0, 1]) == [0, 1]


def test_a_directory_that_vanishes_is_made_again(adapters, tmp_path):
    adapter = adapters()
    adapter.store([0])
    shutil.rmtree(tmp_path / "kv")
    assert adapter.load([0]) == []
    assert adapter.store([1]).is_successful()
    assert adapter.load([0, 1]) == [1]


def test_an_error_that_nobody_thought_of_is_a_miss(adapters, monkeypatch, log):
    adapter = adapters()
    adapter.store([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(adapter.store_, "read", lambda *args: 1 / 0)
        assert adapter.load([0, 1]) == []
    assert [line for line in log if "a load failed" in line]
    assert adapter.load([0, 1]) == [0, 1]


# Memory that the server takes back


def test_memory_taken_back_while_it_is_written_is_not_stored(adapters, monkeypatch):
    adapter = adapters()
    objects = adapter.filled([0])
    write = os.write

    def free_and_reuse(fd, piece):
        adapter.l1.free(list(objects))
        return write(fd, piece)

    monkeypatch.setattr(chunk_file.os, "write", free_and_reuse)
    assert not adapter.submit_store([make_key(0)], objects).is_successful()
    assert adapter.look_up([0]) == []
    assert [path.name for path in adapter.store_.directory.iterdir()] == ["lock"]


def test_memory_taken_back_during_a_load_is_not_written(adapters, monkeypatch):
    adapter = adapters()
    adapter.store([0])
    objects = adapter.allocate()
    preadv = os.preadv

    def free_and_reuse(*args):
        count = preadv(*args)
        adapter.l1.free(list(objects))
        [again] = adapter.allocate()
        assert again.data_ptr == objects[0].data_ptr
        again.tensor.copy_(content(9))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "preadv", free_and_reuse)
        assert adapter.load([0], objects=list(objects)) == []
    assert torch.equal(adapter.lent[-1].tensor, content(9))
    assert adapter.load([0]) == [0]  # the file was not at fault


def test_memory_taken_back_before_a_load_is_not_touched(adapters):
    adapter = adapters()
    adapter.store([0])
    [obj] = adapter.allocate()
    adapter.l1.free([obj])
    [again] = adapter.filled([9])
    assert again.data_ptr == obj.data_ptr
    task = adapter.tier.submit_load_task([make_key(0)], [obj])
    fd = adapter.tier.get_load_event_fd()
    assert not adapter.wait(fd, lambda: adapter.tier.query_load_result(task)).test(0)
    assert torch.equal(again.tensor, content(9))
