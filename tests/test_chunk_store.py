"""Real files in a temporary directory; faults are injected at the system call or in the file."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_xpu.disk.chunk_file import HEADER_BYTES, disk_bytes
from lmcache_xpu.disk.chunk_store import ChunkStore
from lmcache_xpu.errors import SettingsError

KIB = 1024
NO_LIMIT = 1 << 40


def payload(key, size=3 * KIB):
    return random.Random(key).randbytes(size)


def load(store, key):
    """The payload, or None on a miss."""
    info = store.info(key)
    if info is None:
        return None
    buffer = bytearray(info.payload_bytes)
    return bytes(buffer) if store.read(key, memoryview(buffer)) else None


def files(directory):
    return sorted(p for p in directory.iterdir() if p.suffix == ".lmxkv")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def store(directory):
    store = ChunkStore(directory, NO_LIMIT)
    yield store
    store.close()


def reopened(store, limit=NO_LIMIT):
    store.close()
    return ChunkStore(store.directory, limit, lock_seconds=0)


def test_a_chunk_comes_back_with_its_meta(store):
    assert store.put("a", "meta of a", payload("a"))
    assert store.info("a") == ("meta of a", 3 * KIB)
    assert load(store, "a") == payload("a")
    assert load(store, "b") is None
    counters = store.counters
    assert (counters.hits, counters.stored, counters.bytes) == (1, 1, disk_bytes(3 * KIB))


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
    assert store.counters.dropped == 1


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


# Size


def test_least_recently_used_goes_first(store):
    store._index.limit_bytes = 3 * disk_bytes(3 * KIB)
    for key in "abc":
        store.put(key, "", payload(key))
    store.touch(["a"])
    store.put("d", "", payload("d"))
    assert [key for key in "abcd" if key in store] == ["a", "c", "d"]
    assert store.counters.evicted == 1


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


def test_a_limit_of_zero_empties(store, directory):
    store.put("a", "", payload("a"))
    reopened(store, 0).close()
    assert files(directory) == []


def test_a_chunk_above_the_limit_evicts_nothing(store):
    store._index.limit_bytes = 3 * disk_bytes(3 * KIB)
    store.put("a", "", payload("a"))
    assert not store.put("big", "", bytes(64 * KIB))
    assert "a" in store
    assert store.counters.dropped == 1


def test_pinned_chunks_are_not_evicted(store):
    store._index.limit_bytes = 2 * disk_bytes(3 * KIB)
    store.put("a", "", payload("a"))
    store.put("b", "", payload("b"))
    assert store.pin("a")
    assert store.pin("a")
    store.put("c", "", payload("c"))
    assert [key for key in "abc" if key in store] == ["a", "c"]
    assert store.pin("c")
    assert not store.put("d", "", payload("d"))
    assert store.unpin("a")
    assert not store.put("d", "", payload("d"))
    assert store.unpin("a")
    assert not store.unpin("a")
    assert store.put("d", "", payload("d"))
    assert [key for key in "abcd" if key in store] == ["c", "d"]


def test_a_forgotten_pin_ends(directory):
    store = ChunkStore(directory, disk_bytes(3 * KIB), pin_seconds=0.05)
    store.put("a", "", payload("a"))
    store.pin("a")
    assert not store.put("b", "", payload("b"))
    time.sleep(0.06)
    assert store.put("b", "", payload("b"))
    store.close()


def test_a_pin_outlives_its_damaged_file(store):
    store.put("a", "", payload("a"))
    store.pin("a")
    os.truncate(store._path("a"), 100)
    assert load(store, "a") is None
    assert store.pinned("a")
    assert not store.pin("a")
    assert store.unpin("a")
    assert not store.pinned("a")


def test_clear_leaves_the_pinned(store, directory):
    store.put("a", "A", payload("a"))
    store.put("b", "B", payload("b"))
    store.pin("b")
    assert [info.meta for info in store.clear()] == ["A"]
    assert files(directory) == [store._path("b")]
    assert store.remove("b")
    assert not store.remove("b")


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


KILLED = """
import os, sys
from pathlib import Path
from lmcache_xpu.disk.chunk_store import ChunkStore
store = ChunkStore(Path(sys.argv[1]), 1 << 40)
store.put("whole", "", b"w" * 100_000)
write = os.write
def slow(fd, data):
    done = write(fd, data[:1000])
    print("writing", flush=True)
    sys.stdin.read()
    return done
os.write = slow
store.put("half", "", b"h" * 100_000)
"""


def test_kill_in_the_middle_of_a_write(directory):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == b"writing\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert len([p for p in directory.iterdir() if p.name.endswith(".tmp")]) == 1
        store = ChunkStore(directory, NO_LIMIT, lock_seconds=0)
    assert load(store, "whole") == b"w" * 100_000
    assert "half" not in store
    assert sorted(p.name for p in directory.iterdir()) == [store._path("whole").name, "lock"]
    store.close()


# Sharing


def test_a_second_process_is_told_who_has_the_directory(directory):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == b"writing\n"
        with pytest.raises(SettingsError, match=f"in use by process {child.pid}"):
            ChunkStore(directory, NO_LIMIT, lock_seconds=0)
        child.stdin.close()  # and the first goes on undisturbed
        assert child.wait() == 0
    store = ChunkStore(directory, NO_LIMIT, lock_seconds=0)
    assert load(store, "half") == b"h" * 100_000
    store.close()


def test_a_start_waits_for_the_one_that_is_ending(store, directory):
    timer = threading.Timer(0.2, store.close)
    timer.start()
    ChunkStore(directory, NO_LIMIT, lock_seconds=5).close()
    timer.join()


def test_a_closed_store_refuses(store):
    store.close()
    store.close()
    assert not store.put("a", "", payload("a"))


@pytest.mark.parametrize("bad", ["file", "beneath a file"])
def test_a_directory_that_cannot_be(tmp_path, bad):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="directory"):
        ChunkStore(tmp_path / ("file" if bad == "file" else "file/kv"), NO_LIMIT)


def test_many_threads_never_see_another_chunk(directory):
    limit = 12 * disk_bytes(20 * KIB)
    store = ChunkStore(directory, limit)
    contents = {f"k{i}": payload(i, 20 * KIB) for i in range(30)}
    errors = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(300):
                key = rng.choice(list(contents))
                match rng.randrange(5):
                    case 0 | 1:
                        store.put(key, "", contents[key])
                    case 2:
                        found = load(store, key)
                        assert found in (None, contents[key])
                    case 3:
                        if store.pin(key):
                            store.touch([key])
                            store.unpin(key)
                    case 4:
                        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                            os.truncate(store._path(key), 5000)
        except BaseException as error:  # for the test's thread, which fails by it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert store._index._pins == {}
    assert store._index.reserved_bytes == 0
    used = sum(disk_bytes(p.stat().st_size - HEADER_BYTES) for p in files(directory))
    assert used <= limit
    assert {store._path(key) for key in contents if key in store} == set(files(directory))
    store.close()


class StoreMachine(RuleBasedStateMachine):
    """Against a model: each key's content, whether its file was harmed, and its last use."""

    keys = st.sampled_from(["a", "b", "c", "d", "e"])
    sizes = st.sampled_from([0, 1, 5000, 9000])
    limit = 40 * KIB

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.store = ChunkStore(Path(self.place.name), self.limit)
        self.model = {}  # key -> payload, oldest use first
        self.harmed = set()
        self.pinned = {}

    def used(self, key):
        self.model[key] = self.model.pop(key)

    @rule(key=keys, size=sizes)
    def put(self, key, size):
        if key in self.model:
            assert self.store.put(key, key, b"")
            self.used(key)
            return
        data = payload(f"{key}{size}", size)
        need = disk_bytes(size)
        held = sum(disk_bytes(len(self.model[k])) for k in self.pinned if k in self.model)
        fits = held + need <= self.limit
        assert self.store.put(key, key, data) == fits
        if fits:
            while sum(disk_bytes(len(v)) for v in self.model.values()) + need > self.limit:
                del self.model[next(k for k in self.model if k not in self.pinned)]
            self.harmed &= set(self.model)
            self.model[key] = data

    @rule(key=keys)
    def get(self, key):
        expected = None if key in self.harmed else self.model.get(key)
        assert load(self.store, key) == expected
        if key in self.harmed:
            self.harmed.remove(key)
            del self.model[key]

    @rule(chosen=st.lists(keys, unique=True))
    def touch(self, chosen):
        self.store.touch(chosen)
        for key in reversed([k for k in chosen if k in self.model]):
            self.used(key)

    @rule(key=keys)
    def pin(self, key):
        assert self.store.pin(key) == (key in self.model)
        if key in self.model:
            self.pinned[key] = self.pinned.get(key, 0) + 1

    @rule(key=keys)
    def unpin(self, key):
        assert self.store.unpin(key) == (key in self.pinned)
        if key in self.pinned:
            self.pinned[key] -= 1
            self.pinned = {k: n for k, n in self.pinned.items() if n}

    @rule(key=keys)
    def remove(self, key):
        assert self.store.remove(key) == (key in self.model)
        self.model.pop(key, None)
        self.harmed.discard(key)

    @rule(key=keys, at=st.integers(0, 8999), bit=st.integers(0, 7))
    def flip(self, key, at, bit):
        if self.model.get(key) and key not in self.harmed:
            path = self.store._path(key)
            at = HEADER_BYTES + at % len(self.model[key])
            times = path.stat()
            raw = bytearray(path.read_bytes())
            raw[at] ^= 1 << bit
            path.write_bytes(raw)
            os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))
            self.harmed.add(key)

    @rule(key=keys, lost=st.integers(1, 9000))
    def truncate(self, key, lost):
        if self.model.get(key) and key not in self.harmed:
            path = self.store._path(key)
            times = path.stat()
            os.truncate(path, max(0, times.st_size - lost))
            os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))
            self.harmed.add(key)

    @rule()
    def reopen(self):
        for key in list(self.harmed):
            length = HEADER_BYTES + len(self.model[key])
            if self.store._path(key).stat().st_size != length:  # found by the scan
                self.harmed.remove(key)
                del self.model[key]
        self.store = reopened(self.store, self.limit)
        self.pinned = {}

    @invariant()
    def the_index_is_the_directory(self):
        assert {k for k in "abcde" if k in self.store} == set(self.model)
        assert set(files(self.store.directory)) == {self.store._path(k) for k in self.model}
        used = sum(disk_bytes(len(v)) for v in self.model.values())
        assert self.store.counters.bytes == used <= self.limit

    def teardown(self):
        self.store.close()
        self.place.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
