"""A chunk store used by many threads, found by a second process, in any order."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.chunk_files import KIB, NO_LIMIT, file_of, files, load, payload, reopened

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk.chunk_file import HEADER_BYTES, disk_bytes
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

WRITING = """
import os, sys
from pathlib import Path
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
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


@contextlib.contextmanager
def writing(directory):
    """A process that has stored a chunk and is in the middle of writing another."""
    command = [sys.executable, "-c", WRITING, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"writing\n"
        yield child


def test_kill_in_the_middle_of_a_write(directory):
    with writing(directory) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert len([p for p in directory.iterdir() if p.name.endswith(".tmp")]) == 1
        store = ChunkStore(directory, NO_LIMIT, lock_seconds=0)
    assert load(store, "whole") == b"w" * 100_000
    assert "half" not in store
    assert sorted(p.name for p in directory.iterdir()) == [file_of(store, "whole").name, "lock"]
    store.close()


def test_a_second_process_is_told_who_has_the_directory(directory):
    with writing(directory) as child:
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

    def work(seed):
        rng = random.Random(seed)
        for _ in range(300):
            key = rng.choice(list(contents))
            match rng.randrange(5):
                case 0 | 1:
                    store.put(key, "", contents[key])
                case 2:
                    loaded = load(store, key)
                    assert loaded in (None, contents[key])
                case 3:
                    store.touch([key])
                case 4:
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        os.truncate(file_of(store, key), 5000)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8), timeout=60))  # raises what a thread raised
    assert store._index.reserved_bytes == 0
    used = sum(disk_bytes(p.stat().st_size - HEADER_BYTES) for p in files(directory))
    assert used <= limit
    assert {file_of(store, key) for key in contents if key in store} == set(files(directory))
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
        assert self.store.put(key, key, data)
        while sum(disk_bytes(len(v)) for v in self.model.values()) + need > self.limit:
            del self.model[next(iter(self.model))]
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
    def remove(self, key):
        assert self.store.remove(key) == (key in self.model)
        self.model.pop(key, None)
        self.harmed.discard(key)

    @rule(key=keys, at=st.integers(0, 8999), bit=st.integers(0, 7))
    def flip(self, key, at, bit):
        if self.model.get(key) and key not in self.harmed:
            path = file_of(self.store, key)
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
            path = file_of(self.store, key)
            times = path.stat()
            os.truncate(path, max(0, times.st_size - lost))
            os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))
            self.harmed.add(key)

    @rule()
    def reopen(self):
        for key in list(self.harmed):
            length = file_of(self.store, key).stat().st_size - HEADER_BYTES
            if length < 0:
                self.harmed.remove(key)
                del self.model[key]
            else:
                self.model[key] = self.model[key][:length]
        self.store = reopened(self.store, self.limit)

    @invariant()
    def the_index_is_the_directory(self):
        assert {k for k in "abcde" if k in self.store} == set(self.model)
        assert set(files(self.store.directory)) == {file_of(self.store, k) for k in self.model}
        used = sum(disk_bytes(len(v)) for v in self.model.values())
        assert self.store.counters["bytes"] == used <= self.limit

    def teardown(self):
        self.store.close()
        self.place.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
