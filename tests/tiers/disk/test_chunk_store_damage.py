"""Damaged files of a chunk store, and writes that fail: in the file, or at the system call."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
from support.chunk_files import KIB, NO_LIMIT, file_of, files, load, payload, reopened

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk import chunk_file
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


def raising(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize(
    "ask", [load, lambda store, key: store.read(key, memoryview(bytearray(KIB)))]
)
def test_a_damaged_file_is_gone_once_it_is_asked_for_after_a_restart(store, directory, damage, ask):
    store.put("a", "", payload("a"))
    store.put("b", "", payload("b"))
    damage(file_of(store, "a"))
    again = reopened(store)
    assert not ask(again, "a")
    assert load(again, "b") == payload("b")
    assert files(directory) == [file_of(store, "b")]
    assert again.counters["corrupt"] == 1
    again.close()


@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - {"longer than written"}))
def test_a_file_damaged_while_in_use_is_a_miss_and_removed(store, directory, damage):
    store.put("a", "", payload("a"))
    DAMAGE[damage](file_of(store, "a"))
    assert load(store, "a") is None
    assert "a" not in store
    assert files(directory) == []
    counters = store.counters
    assert (counters["corrupt"], counters["misses"], counters["bytes"]) == (1, 1, 0)


@pytest.mark.parametrize("offset", [HEADER_BYTES, HEADER_BYTES + 2999])
def test_a_bit_flip_in_the_payload_is_found_at_the_read(store, offset):
    store.put("a", "", payload("a"))
    flip(file_of(store, "a"), offset)
    again = reopened(store)
    assert "a" in again  # a scan reads no payloads
    assert load(again, "a") is None
    assert "a" not in again
    again.close()


def test_a_chunk_under_another_ones_name_is_not_taken_for_it(store):
    store.put("a", "", payload("a"))
    store.put("b", "", payload("b"))
    file_of(store, "b").write_bytes(file_of(store, "a").read_bytes())
    assert load(store, "b") is None
    assert load(store, "a") == payload("a")


def test_a_chunk_under_another_ones_name_is_not_found_after_a_restart(store):
    store.put("a", "", payload("a"))
    file_of(store, "a").rename(file_of(store, "b"))
    again = reopened(store)
    assert "a" not in again
    assert load(again, "b") is None
    assert "b" not in again
    assert again.counters["bytes"] == 0
    again.close()


def test_a_file_that_the_disk_cannot_read_is_a_miss_and_removed(store, directory, monkeypatch):
    store.put("a", "", payload("a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", raising(errno.EIO))
        assert load(store, "a") is None
    assert ("a" in store, files(directory), store.counters["bytes"]) == (False, [], 0)
    assert (store.counters["errors"], store.counters["misses"]) == (1, 1)


def test_an_earlier_run_s_file_that_the_disk_cannot_read_is_removed(store, directory, monkeypatch):
    store.put("a", "", payload("a"))
    again = reopened(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", raising(errno.EIO))
        assert load(again, "a") is None
    assert (len(again), files(directory)) == (0, [])
    again.close()


def test_an_earlier_run_s_file_stays_if_this_process_is_at_fault(store, directory, monkeypatch):
    store.put("a", "", payload("a"))
    again = reopened(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", raising(errno.EMFILE))
        assert load(again, "a") is None
    assert load(again, "a") == payload("a")
    again.close()


def test_a_start_opens_no_file(store, monkeypatch):
    for key in "abc":
        store.put(key, f"meta of {key}", payload(key))
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", raising(errno.EIO))
        again = reopened(store)
    assert [again.info(key) for key in "abc"] == [(f"meta of {key}", 3 * KIB) for key in "abc"]
    again.close()


def test_chunks_of_earlier_runs_are_removed_by_their_keys(store):
    for key in "abc":
        store.put(key, "", payload(key))
    again = reopened(store)
    assert again.remove_all("ac".__contains__)
    assert [key for key in "abc" if key in again] == ["b"]
    again.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES])
def test_a_read_that_fails_is_a_miss_and_the_chunk_stays(store, directory, monkeypatch, error):
    store.put("a", "", payload("a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", raising(error))
        assert load(store, "a") is None
    assert (store.counters["errors"], store.counters["misses"]) == (1, 1)
    assert load(store, "a") == payload("a")


def test_what_cannot_be_a_chunk_does_not_stop_the_start(store, directory):
    store.put("a", "", payload("a"))
    (directory / ("0" * 64 + ".lmxkv")).mkdir()
    (directory / ("1" * 64 + ".lmxkv")).symlink_to("/dev/zero")
    os.mkfifo(directory / ("2" * 64 + ".lmxkv"))
    (directory / "notes.txt").write_text("not ours")
    again = reopened(store)
    assert load(again, "a") == payload("a")
    assert again.counters["corrupt"] == 0
    assert (directory / "notes.txt").read_text() == "not ours"
    again.close()


def test_a_header_whose_text_is_no_text_is_damage(store, directory):
    store.put("a", "", payload("a"))
    raw = bytearray(file_of(store, "a").read_bytes())
    raw[chunk_file._FIXED.size] = 0xFF
    crc_at = chunk_file._CRC_AT
    raw[crc_at : crc_at + 4] = bytes(4)
    raw[crc_at : crc_at + 4] = zlib.crc32(raw[:HEADER_BYTES]).to_bytes(4, "little")
    file_of(store, "a").write_bytes(raw)
    again = reopened(store)
    assert load(again, "a") is None
    assert (len(again), again.counters["corrupt"], files(directory)) == (0, 1, [])
    again.close()


def test_a_file_that_claims_more_than_the_tier_has_evicts_no_other(store, directory):
    for key in "abc":
        store.put(key, "", payload(key))
    size = 1 << 40
    header = chunk_file._Header("huge", chunk_file.ChunkInfo("", size), 0)
    file_of(store, "huge").write_bytes(chunk_file._pack(header))
    os.truncate(file_of(store, "huge"), HEADER_BYTES + size)
    again = reopened(store, 1 << 20)
    assert {key for key in ("a", "b", "c", "huge") if key in again} == {"a", "b", "c"}
    again.close()


def test_a_removed_file_is_a_plain_miss(store):
    store.put("a", "", payload("a"))
    file_of(store, "a").unlink()
    assert load(store, "a") is None
    counters = store.counters
    assert (counters["corrupt"], counters["errors"], counters["misses"], counters["bytes"]) == (
        0,
        0,
        1,
        0,
    )


def test_files_that_cannot_be_removed_keep_their_room(store, directory, monkeypatch):
    limit = 5 * disk_bytes(3 * KIB)
    again = reopened(store, limit)
    for number in range(5):
        again.put(str(number), "", payload(number))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", raising(errno.EPERM))
        for number in range(5, 20):
            assert not again.put(str(number), "", payload(number))
        assert not again.remove_all("0".__eq__)  # a reset: it is known to be incomplete
        assert [load(again, str(number)) == payload(number) for number in range(5)] == [True] * 5
    assert sum(path.stat().st_blocks * 512 for path in files(directory)) <= limit
    assert again.put("20", "", payload(20))  # and goes on when it can
    assert sum(path.stat().st_blocks * 512 for path in files(directory)) <= limit
    again.close()


def test_one_file_that_cannot_be_removed_does_not_stop_the_rest(store, directory, monkeypatch):
    again = reopened(store, 5 * disk_bytes(3 * KIB))
    again.put("stuck", "", payload("stuck"))
    unlink, stuck = Path.unlink, file_of(again, "stuck").name

    def some(self, **options):
        return raising(errno.EPERM)() if self.name == stuck else unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", some)
    for number in range(20):
        assert again.put(str(number), "", payload(number))
    assert len(files(directory)) == 5
    again.close()


def test_a_temporary_file_that_stays_keeps_its_room(store, directory, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", raising(errno.EIO))
        patch.setattr(os, "pwrite", raising(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            store.put("a", "", payload("a"))
    assert store._index.reserved_bytes == disk_bytes(3 * KIB)
    again = reopened(store)
    assert [path.name for path in directory.iterdir()] == ["lock"]
    again.close()


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
    assert (counters["dropped"], counters["errors"]) == (1, 1)
    assert counters["bytes"] == disk_bytes(3 * KIB)
    assert store._index.reserved_bytes == 0
    assert store.put("b", "", payload("b"))


def test_short_writes_and_reads_are_continued(store, monkeypatch):
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))

    def read_700(fd, buffers, at):  # the header is the first buffer, where there are two
        return preadv(fd, [*buffers[:-1], buffers[-1][:700]], at)

    monkeypatch.setattr(os, "preadv", read_700)
    store.put("a", "", payload("a"))
    assert load(store, "a") == payload("a")
    buffer = memoryview(bytearray(len(payload("a"))))
    assert store.read("a", buffer, lambda: True)
    assert buffer == payload("a")


def test_a_removed_directory_is_made_again(store, directory):
    store.put("a", "", payload("a"))
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert load(store, "a") is None
    assert store.put("b", "", payload("b"))
    assert load(store, "b") == payload("b")
    assert store.counters["bytes"] == disk_bytes(3 * KIB)
    with pytest.raises(SettingsError):  # and held again
        ChunkStore(directory, NO_LIMIT, lock_seconds=0)
