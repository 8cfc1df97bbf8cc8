"""Look-ups in a cache of this process whose disk may be slower than computing."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.until import until

from lmcache_xpu.cache.local_cache import LocalCache, PromptKeys
from lmcache_xpu.cache.local_client import LocalLookUps
from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.cache.protocol import TokenRange

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
CHUNK, CHUNKS = 16, 4
LENGTH = CHUNK * CHUNKS


class Policy:
    def __init__(self) -> None:
        self.allows, self.asked, self.read = True, list[int](), list[int]()
        self.seconds = 0.0  # that the last read took

    def reads(self, tokens: int) -> bool:
        self.asked.append(tokens)
        return self.allows

    def was_read(self, tokens: int, seconds: float) -> None:
        assert 0 <= seconds < 60
        self.read.append(tokens)
        self.seconds = seconds


class Looking:
    """A scheduler's look-ups of one prompt, of which chunks are stored."""

    def __init__(self, disk: Path) -> None:
        options = LocalCacheOptions(
            chunk_tokens=CHUNK, cpu_gib=2**-10, disk_path=disk, disk_gib=0.01
        )
        self.cache = LocalCache(options, torch.device("cpu"), "model")
        self.cache.register([4096], [0])
        self.policy = Policy()
        self.lookups = LocalLookUps(self.cache, self.policy)
        self._names = map(str, itertools.count())
        self.keys = self.named("chunk")

    def named(self, name: str) -> PromptKeys:
        keys = self.cache.prompt_keys("")
        keys.extend([f"{name} {number}".encode() for number in range(CHUNKS)])
        return keys

    def tokens(self) -> TokenRange:
        return TokenRange(next(self._names), self.keys, 0, LENGTH)

    def store(self) -> None:
        self.cache.reserve(0, self.tokens(), [()])
        self.cache.commit(0)

    def forget_in_memory(self, chunks: slice) -> None:
        keys = self.keys.by_group[0][chunks]
        until(lambda: all(map(self.cache._storage._l1_manager.is_key_evictable, keys)))
        self.cache._storage._l1_manager.delete(keys)

    def find(self) -> int:
        tokens, hits = self.tokens(), list[Any]()

        def is_answered() -> bool:
            hits.append(self.lookups.find(tokens, is_alone=True))
            return hits[-1] is not None

        until(is_answered)
        self.lookups.give_back(tokens.request_id)
        return int(hits[-1])


@pytest.fixture
def looking(tmp_path) -> Any:
    looking = Looking(tmp_path / "disk")
    looking.store()
    [(_, disk)] = looking.cache._storage.l2_adapters()
    until(lambda: len(disk._store) == CHUNKS)
    yield looking
    looking.cache._storage.close()


def test_memory_that_has_all_asks_nobody(looking):
    assert looking.find() == LENGTH
    assert looking.policy.asked == looking.policy.read == []


def test_what_memory_lacks_is_read_and_timed(looking):
    looking.forget_in_memory(slice(1, None))
    assert looking.find() == LENGTH
    assert looking.policy.asked == looking.policy.read == [LENGTH - CHUNK]


def test_a_request_that_waits_in_a_queue_does_not_wait_for_its_read(looking):
    looking.forget_in_memory(slice(1, None))
    tokens = looking.tokens()
    looking.lookups.begin(tokens)
    until(lambda: not looking.cache._storage._prefetch_controller._in_flight_requests)
    time.sleep(0.5)  # as in a queue
    until(lambda: looking.lookups.find(tokens, is_alone=False) is not None)
    assert looking.lookups.find(tokens, is_alone=False) == LENGTH
    assert looking.policy.read == [LENGTH - CHUNK]
    assert looking.policy.seconds < 0.4
    looking.lookups.give_back(tokens.request_id)


def test_what_a_slow_disk_has_is_not_read_and_memory_s_part_is_hit(looking):
    looking.policy.allows = False
    looking.forget_in_memory(slice(1, None))
    assert looking.find() == CHUNK
    assert looking.policy.read == []


def test_what_nobody_has_was_not_read(looking):
    looking.keys = looking.named("another")
    assert looking.find() == 0
    assert (looking.policy.asked, looking.policy.read) == ([LENGTH], [])
