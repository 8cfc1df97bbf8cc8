"""Engines of several TP sizes on one directory: stores of all ranks or some, damage, loads."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from oracle import MismatchError
from support import shards, storage

NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)
RANKS = st.sampled_from((1, 2, 4))


class Sizes(RuleBasedStateMachine):
    """One engine after another; the directory has room for all. With two heads four ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="lmcache-xpu-fuzz-"))
        self.engines: list[storage.Engine] = []
        self.whole: set[int] = set()  # chunks that all ranks stored, and nothing has damaged
        self.damaged: set[int] = set()  # not written again before somebody has read it
        self.stored: set[int] = set()  # any rank

    @initialize(ranks=RANKS, heads=st.sampled_from((2, 8)))
    def begin(self, ranks: int, heads: int) -> None:
        self.heads = heads
        self.start(ranks)
        self.store(list(range(4)), None)

    def start(self, ranks: int) -> None:
        self.engines = [
            storage.Engine(
                self.path, shards.rank_metadata(rank, ranks, self.heads), pool_chunks=256
            )
            for rank in range(ranks)
        ]

    def end(self) -> None:
        for engine in self.engines:
            engine.settle()
            in_use = engine.pool_in_use
            engine.close()
            if in_use:
                raise MismatchError(f"{in_use} bytes of the pool are still in use")

    def teardown(self) -> None:
        try:
            for number in sorted(self.stored):
                self.load([number])
            self.end()
        finally:
            for engine in self.engines:
                engine.close()
            shutil.rmtree(self.path)

    @rule(ranks=RANKS)
    def restart(self, ranks: int) -> None:
        """All that is there is asked for, or hypothesis would come to that too seldom."""
        self.end()
        self.start(ranks)
        self.load(sorted(self.stored))

    @rule(numbers=NUMBERS, left_out=st.sampled_from((None, None, 0, 1, 3)))
    def store(self, numbers: list[int], left_out: int | None) -> None:
        """By all ranks, or all but one."""
        size = len(self.engines)
        for rank, engine in enumerate(self.engines):
            if rank != left_out:
                shards.store(engine, rank, size, numbers, self.heads)
        self.stored |= set(numbers)
        if left_out is None or left_out >= size:
            self.whole |= set(numbers) - self.damaged

    @rule(numbers=NUMBERS)
    def load(self, numbers: list[int]) -> None:
        """The right bytes; all chunks that are whole, none that nobody stored."""
        size = len(self.engines)
        for rank, engine in enumerate(self.engines if numbers else ()):
            try:
                _, loaded = shards.load(engine, rank, size, numbers, self.heads)
            except AssertionError as error:
                raise MismatchError(f"rank {rank} of {size}: other bytes") from error
            expected = [number in self.whole for number in numbers]
            certain = expected.index(False) if False in expected else len(numbers)
            if len(loaded) < certain or not self.stored.issuperset(loaded):
                raise MismatchError(f"rank {rank} of {size}: {loaded} of {numbers}")

    @rule(seed=st.integers(0, 2**32))
    def damage(self, seed: int) -> None:
        """A bit flips in one file; of which chunk, its header says."""
        files = sorted(self.path.glob("*/*.lmxkv"))
        if not files:
            return
        rng = random.Random(seed)
        file = rng.choice(files)
        raw = bytearray(file.read_bytes())
        raw[rng.randrange(4096, len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
        number = next(n for n in self.stored if f"@{n:x}@torch".encode() in raw[:4096])
        self.whole.discard(number)
        self.damaged.add(number)
