"""The disk tier in LMCache's StorageManager: keys, queued writes, pool, restarts, damage."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from lmcache.v1.memory_management import MemoryFormat
from oracle import MismatchError
from support import storage
from support.chunk_files import file_of

from lmcache_xpu.tiers.disk import chunk_store

NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
# The same chunk of another model, of another layer, of another tag: other keys, other bytes.
VARIANTS = ({}, {"model_name": "b/model"}, {"worker_id": 1}, {"dtype": torch.float16})


def slowly(write: Callable[..., None]) -> Callable[..., None]:
    """So that some writes have not ended when the next thing happens."""

    def wrapped(*args: object) -> None:
        time.sleep(0.005)
        write(*args)

    return wrapped


class Tier(RuleBasedStateMachine):
    """Engines, one after the other, on one directory that has room for all."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="lmcache-xpu-fuzz-"))
        self.slow = mock.patch.object(chunk_store, "write_chunk", slowly(chunk_store.write_chunk))
        self.slow.start()
        self.engine = storage.Engine(self.path, pool_chunks=256)
        self.stored: set[tuple[int, int]] = set()
        self.damaged: set[tuple[int, int]] = set()

    def teardown(self) -> None:
        try:
            for number, variant in sorted(self.damaged) or sorted(self.stored)[:4]:
                self.load([number], variant, pinned=True)
            if self.engine.pool_in_use:
                raise MismatchError(f"{self.engine.pool_in_use} bytes of the pool are still in use")
        finally:
            self.engine.settle()
            self.engine.close()
            self.slow.stop()
            shutil.rmtree(self.path)

    @staticmethod
    def key(number: int, variant: int) -> object:
        return storage.make_key(number, **VARIANTS[variant])

    @staticmethod
    def content(number: int, variant: int) -> torch.Tensor:
        return storage.content(number * len(VARIANTS) + variant)

    @rule(numbers=NUMBERS, variant=st.integers(0, 3), wait=st.booleans())
    def store(self, numbers: list[int], variant: int, wait: bool) -> None:
        keys = [self.key(number, variant) for number in numbers]
        objs = [self.engine.allocate(self.content(number, variant)) for number in numbers]
        self.engine.manager.batched_put(keys, objs)
        new = {(number, variant) for number in numbers}
        self.stored |= new
        if wait:
            self.engine.settle()

    @rule(numbers=NUMBERS, variant=st.integers(0, 3), pinned=st.booleans())
    def load(self, numbers: list[int], variant: int, pinned: bool) -> None:
        """The prefix that is there, with its own bytes, and no more."""
        self.engine.settle()
        keys = [self.key(number, variant) for number in numbers]
        if pinned:
            hits, _ = self.engine.manager.batched_contains(keys, pin=True)
        objs = self.engine.manager.batched_get(keys, location="disk") if keys else []
        ended = False
        for number, obj in zip(numbers, objs, strict=True):
            chunk = number, variant
            ended = ended or chunk not in self.stored or chunk in self.damaged
            if (obj is None) != ended:
                raise MismatchError(f"{chunk}: {'missing' if obj is None else 'served'}")
            if obj is not None:
                if not torch.equal(obj.tensor, self.content(*chunk)):
                    raise MismatchError(f"{chunk}: other bytes were served")
                if obj.meta.fmt is not MemoryFormat.KV_2LTD:
                    raise MismatchError(f"{chunk}: came back as {obj.meta.fmt}")
                obj.ref_count_down()
        if pinned and keys:
            self.engine.manager.batched_unpin(keys[:hits], ["disk"])
        # What was read and found damaged is gone; those behind a miss may have been read, too.
        for number in numbers:
            chunk = number, variant
            if chunk in self.damaged and not self.engine.tier.contains(self.key(*chunk)):
                self.damaged.discard(chunk)
                self.stored.discard(chunk)

    @rule(numbers=NUMBERS, variant=st.integers(0, 3))
    def restart(self, numbers: list[int], variant: int) -> None:
        """What was queued is on disk before the directory is given to the next one."""
        self.store(numbers, variant, wait=False)
        self.engine.close()
        self.engine = storage.Engine(self.path, pool_chunks=256)

    @rule(number=st.integers(0, 9), variant=st.integers(0, 3), seed=st.integers(0, 2**32))
    def damage(self, number: int, variant: int, seed: int) -> None:
        """A bit flips in the payload."""
        chunk = number, variant
        self.store([number], variant, wait=True)
        if chunk in self.damaged:
            return
        tier = self.engine.tier
        file = file_of(tier._store, tier.name(self.key(*chunk)))
        raw, rng = bytearray(file.read_bytes()), random.Random(seed)
        raw[rng.randrange(4096, len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
        self.damaged.add(chunk)
