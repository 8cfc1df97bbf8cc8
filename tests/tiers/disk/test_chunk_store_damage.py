"""Damaged files of a chunk store, and writes that fail: in the file, or at the system call."""

from __future__ import annotations

import errno
import os

import pytest
from support.chunk_files import KIB, NO_LIMIT, files, load, payload, reopened

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, disk_bytes
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

DAMAGE = {
    "truncated to nothing": lambda p: p.write_bytes(b""),
    "truncated in the header": lambda p: os.truncate(p, 100),
    "truncated in the payload": lambda p: os.truncate(p, p.stat().st_size - 1),
    "longer than written": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "foreign": lambda p: p.write_bytes(os.urandom(p.stat().st_size)),
    "zeros, as after a power cut": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "of another version": lambda p: flip(p, 8),
    "bit flip in the header": lambda p: flip(p, 60),
}


def flip(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_gone_after_a_restart(store, directory, damage):
    store.put("a", "", payload("a"))
    store.put("b", "", payload("b"))
    damage(store._path("a"))
    again = reopened(store)
    assert load(again, "a") is None
    assert load(again, "b") == payload("b")
    assert files(directory) == [store._path("b")]
    assert again.counters.corrupt == 1
    again.close()


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - {"longer than written"}))
def test_a_file_damaged_while_in_use_is_a_miss_and_removed(store, directory, damage):
    store.put("a", "", payload("a"))
    DAMAGE[damage](store._path("a"))
    assert load(store, "a") is None
    assert "a" not in store
    assert files(directory) == []
    counters = store.counters
    assert (counters.corrupt, counters.misses, counters.bytes) == (1, 1, 0)


@pytest.mark.parametrize("offset", [HEADER_BYTES, HEADER_BYTES + 2999])
def test_a_bit_flip_in_the_payload_is_found_at_the_read(store, offset):
    store.put("a", "", payload("a"))
    flip(store._path("a"), offset)
    again = reopened(store)
    assert "a" in again  # a scan reads no payloads
    assert load(again, "a") is None
    assert "a" not in again
    again.close()


def test_a_chunk_under_another_ones_name_is_not_taken_for_it(store):
    store.put("a", "", payload("a"))
    store.put("b", "", payload("b"))
    store._path("b").write_bytes(store._path("a").read_bytes())
    assert load(store, "b") is None
    assert load(store, "a") == payload("a")


def test_a_chunk_under_another_ones_name_is_not_found_after_a_restart(store):
    store.put("a", "", payload("a"))
    store._path("a").rename(store._path("b"))
    again = reopened(store)
    assert "a" not in again
    assert "b" not in again
    assert again.counters.bytes == 0
    again.close()


def test_unreadable_while_in_use(store, monkeypatch):
    store.put("a", "", payload("a"))

    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert load(store, "a") is None
    assert store.counters.errors == 1
    assert "a" not in store


def test_what_cannot_be_a_chunk_does_not_stop_the_start(store, directory):
    (directory / ("0" * 64 + ".lmxkv")).mkdir()
    (directory / ("1" * 64 + ".lmxkv")).symlink_to("/dev/zero")
    (directory / "notes.txt").write_text("not ours")
    again = reopened(store)
    assert len(again) == 0
    assert again.counters.corrupt == 2
    assert (directory / "notes.txt").read_text() == "not ours"
    again.close()


def test_a_removed_file_is_a_plain_miss(store):
    store.put("a", "", payload("a"))
    store._path("a").unlink()
    assert load(store, "a") is None
    counters = store.counters
    assert (counters.corrupt, counters.errors, counters.misses, counters.bytes) == (0, 0, 1, 0)


def test_a_removed_directory_is_made_again(store, directory):
    store.put("a", "", payload("a"))
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert load(store, "a") is None
    assert store.put("b", "", payload("b"))
    assert load(store, "b") == payload("b")
    assert store.counters.bytes == disk_bytes(3 * KIB)
    with pytest.raises(SettingsError):  # and held again
        ChunkStore(directory, NO_LIMIT, lock_seconds=0)


# Writes that fail


@pytest.mark.parametrize("call", ["write", "pwrite", "utime"])
def test_a_full_disk_drops_the_chunk_and_nothing_else(store, directory, monkeypatch, call):
    store.put("a", "", payload("a"))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            store.put("b", "", payload("b"))
    assert "b" not in store
    assert load(store, "a") == payload("a")
    assert [p.name for p in directory.iterdir() if "tmp" in p.name] == []
    counters = store.counters
    assert (counters.dropped, counters.errors) == (1, 1)
    assert counters.bytes == disk_bytes(3 * KIB)
    assert store._index.reserved_bytes == 0
    assert store.put("b", "", payload("b"))


def test_short_writes_and_reads_are_continued(store, monkeypatch):
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:700]], at))
    store.put("a", "", payload("a"))
    assert load(store, "a") == payload("a")
