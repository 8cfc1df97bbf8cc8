"""The disk tier's store against a model: restarts, kills, damage, evictions, threads.

One thread at a time, the model says exactly what is there: a store that lost a chunk without a
cause is as wrong as one that serves another's bytes. Of what several threads did at once it knows
the bytes, the limit, and what must have survived.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from disk_contents import HEADER, Chunk, Contents, size_on_disk
from disk_damage import KINDS, damage
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from oracle import MismatchError
from support.chunk_files import file_of

from lmcache_xpu.tiers.disk import chunk_index
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

KEYS = st.integers(0, 7).map("key {}".format)
SIZES = st.sampled_from((0, 1, 100, 4095, 4096, 4097, 9000))
ROOM = 4 * (HEADER + 4096)  # not enough for all


class Disk(RuleBasedStateMachine):
    """A directory that outlives its stores."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="lmcache-xpu-fuzz-"))
        self.chunks = Contents(ROOM)
        self.version = itertools.count()
        clock = itertools.count(10**18, 1000)
        self.time = SimpleNamespace(
            time_ns=lambda: self.now, monotonic=lambda: 0.0, sleep=lambda s: None
        )
        self.clock, self.now = clock, next(clock)
        self.patches = [mock.patch.object(chunk_index, "time", self.time)]
        for patch in self.patches:
            patch.start()
        self.store: ChunkStore | None = None

    @initialize(limit=st.sampled_from((ROOM, 2 * ROOM, 100 * ROOM)))
    def start(self, limit: int) -> None:
        self.chunks.limit = limit
        self.open()

    def open(self) -> None:
        paths = {key: file_of(self.store, key) for key in self.chunks}
        lengths = {key: path.stat().st_size for key, path in paths.items() if path.exists()}
        self.store = ChunkStore(self.path, self.chunks.limit, lock_seconds=0)
        self.chunks.scan(lengths)

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self.restart(killed=False, limit=0)
                for key in sorted(self.chunks):
                    self.look(key)
        finally:
            if self.store is not None:
                self.store.close()
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.path)

    def payload(self, key: str, size: int) -> bytes:
        return random.Random(f"{key} {next(self.version)}").randbytes(size)

    def check(self) -> None:
        there = {key for key in (f"key {n}" for n in range(8)) if key in self.store}
        if there != set(self.chunks):
            raise MismatchError(f"{sorted(there)} are stored; the model has {sorted(self.chunks)}")
        if self.store.counters["bytes"] != self.chunks.used:
            raise MismatchError(
                f"{self.store.counters['bytes']} bytes are counted, and are {self.chunks.used}"
            )
        files = [file.stat().st_size for file in self.path.glob("*.lmxkv")]
        # A file that something else made larger is noticed when it is read.
        damaged = any(entry.fate for entry in self.chunks.values())
        if sum(files) > self.chunks.limit and not damaged:
            raise MismatchError(f"files of {sum(files)} bytes, {self.chunks.limit} are allowed")

    # What happens

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), size=SIZES)
    def puts(self, keys: list[str], size: int) -> None:
        for key in keys:
            self.put(key, size)

    def put(self, key: str, size: int) -> None:
        self.now = next(self.clock)
        payload = self.payload(key, size)
        stored = self.store.put(key, f"meta of {key}", payload)
        if key in self.chunks:
            wanted = True
            self.chunks[key].used = self.now
        elif wanted := self.chunks.evict(size_on_disk(size)):
            self.chunks[key] = Chunk(payload, self.now)
        if stored != wanted:
            raise MismatchError(f"a put said {stored}; the model says {wanted}")
        self.check()

    @rule(key=KEYS, size=SIZES, number=st.integers(0, 7))
    def lose_memory(self, key: str, size: int, number: int) -> None:
        """Memory is taken back during a store or a load, as by LMCache's server."""
        self.now = next(self.clock)
        stored = self.store.put(key, "", self.payload(key, size), is_lent=lambda: False)
        if key in self.chunks:
            self.chunks[key].used = self.now
        else:
            self.chunks.evict(size_on_disk(size))
        if stored != (key in self.chunks):
            raise MismatchError(f"a put from memory that was taken back said {stored}")
        self.check()
        if self.chunks:
            key = sorted(self.chunks)[number % len(self.chunks)]
            buffer = bytearray(
                before := random.Random(key).randbytes(len(self.chunks[key].payload))
            )
            served = self.store.read(key, memoryview(buffer), lambda: False)
            if (served and before) or buffer != before:
                raise MismatchError(f"{key}: read to memory that was taken back")
            if self.chunks[key].fate == "gone" or self.chunks[key].goes_when_read:
                del self.chunks[key]
            else:
                self.chunks[key].is_read = True
            self.check()

    @rule(number=st.integers(0, 7))
    def read(self, number: int) -> None:
        if self.chunks:
            self.look(sorted(self.chunks)[number % len(self.chunks)])

    def look(self, key: str) -> None:
        """What is served is what was stored; what is damaged is found, and gone."""
        info = self.store.info(key)
        if (chunk := self.chunks.get(key)) is not None:
            if chunk.goes_when_read:
                del self.chunks[key]
                chunk = None
            else:
                chunk.is_read = True
        if (info is not None) != (chunk is not None):
            raise MismatchError(f"{key}: {info} is known; the model has {chunk}")
        if info is None:
            return
        buffer = bytearray(random.Random(key).randbytes(info.payload_bytes))
        if info.meta != f"meta of {key}" or len(buffer) != len(chunk.payload):
            raise MismatchError(f"{key}: its meta is {info}")
        served = self.store.read(key, memoryview(buffer), lambda: True)
        if served != (not chunk.fate):
            raise MismatchError(f"{key}: served {served}, its file is {chunk.fate or 'whole'}")
        if served and buffer != chunk.payload:
            raise MismatchError(f"{key}: other bytes were served")
        if not served:
            del self.chunks[key]
        self.check()

    @rule(keys=st.lists(KEYS, max_size=3, unique=True))
    def touch(self, keys: list[str]) -> None:
        self.now = next(self.clock)
        self.store.touch(keys)
        for age, key in enumerate(keys):
            if key in self.chunks:
                self.chunks[key].used = self.now - age

    @rule(key=KEYS, kind=st.integers(0, 9))
    def other(self, key: str, kind: int) -> None:
        if kind < 6:
            self.remove(key)
        elif kind < 9:
            self.clear()
        else:
            self.second()

    def remove(self, key: str) -> None:
        if self.store.remove(key) != (key in self.chunks):
            raise MismatchError(f"{key}: removed what was not there, or not what was")
        self.chunks.pop(key, None)
        self.check()

    def clear(self) -> None:
        gone = sorted(self.chunks)[::2]
        if not self.store.remove_all(gone.__contains__):
            raise MismatchError("files are left")
        self.chunks.read_headers()
        for key in gone:
            self.chunks.pop(key, None)
        self.check()

    @rule(killed=st.booleans(), limit=st.sampled_from((0, 0, 0, ROOM, 2 * ROOM)))
    def restart(self, killed: bool, limit: int) -> None:
        """With a smaller or larger limit; or after a kill in the middle of a write."""
        if killed:
            (self.path / "77.lmxkv.tmp").write_bytes(os.urandom(5000))
            self.store._held.release()  # as the kernel does it
        else:
            self.store.close()
        self.chunks.limit = limit or self.chunks.limit
        self.open()
        self.check()
        if list(self.path.glob("*.tmp")):
            raise MismatchError("a file that was not written to its end is left")

    @rule(number=st.integers(0, 7), kind=st.sampled_from(KINDS), at=st.integers(0, 10**6))
    def damage(self, number: int, kind: int, at: int) -> None:
        """One bit flips, a file is cut or zeroed or goes, or another chunk's takes its place."""
        if whole := self.chunks.whole:
            key = whole[number % len(whole)]
            chunk, others = self.chunks[key], [file_of(self.store, k) for k in whole if k != key]
            chunk.fate = damage(file_of(self.store, key), len(chunk.payload), kind, at, others)

    @rule(seed=st.integers(0, 2**32), threads=st.integers(2, 4))
    def storm(self, seed: int, threads: int) -> None:
        """Several threads at once, each key with one payload; then the model looks what is left."""
        for key in [key for key, entry in self.chunks.items() if entry.fate]:
            self.look(key)
        before = {key: entry.payload for key, entry in self.chunks.items()}
        payloads = {
            key: self.payload(key, seed % 9000) for key in (f"key {n}" for n in range(8))
        } | before

        def work(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            for _ in range(12):
                key = f"key {rng.randrange(8)}"
                if rng.random() < 0.5:
                    self.store.put(key, f"meta of {key}", payloads[key])
                elif (info := self.store.info(key)) is not None:
                    buffer = bytearray(info.payload_bytes)
                    served = self.store.read(key, memoryview(buffer))
                    if served and buffer != payloads[key]:
                        raise MismatchError(f"{key}: other bytes were served to a thread")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        there = {key for key in payloads if key in self.store}
        sizes = [size_on_disk(len(payload)) for payload in payloads.values()]
        # Two threads may write the same chunk: it then takes room twice for a moment.
        room = sum(sizes) + threads * max(sizes) <= self.chunks.limit
        if room and not set(before) <= there:
            raise MismatchError("threads lost a chunk that had room")
        self.now = next(self.clock)
        for key in list(self.chunks):
            if key not in there:
                del self.chunks[key]
        for key in sorted(there):
            chunk = self.chunks.setdefault(key, Chunk(payloads[key], 0))
            chunk.used, chunk.is_read = self.now, self.store.info(key) is not None
            self.store.touch([key])
        self.check()

    def second(self) -> None:
        """A directory is one store's."""
        try:
            ChunkStore(self.path, self.chunks.limit, lock_seconds=0)
        except Exception:
            return
        raise MismatchError("two stores share a directory")
