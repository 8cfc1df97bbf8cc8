"""Of one prompt the end goes first: in memory, on disk, and over several tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.asking import CHUNK, OBJECT, Asking, chunks
from support.servers import PASSWORD, Server, needs_server
from support.until import until

from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.tiers import PASSWORD_VARIABLE, shared_l2
from lmcache_xpu.tiers.chunk_layout import object_name
from lmcache_xpu.tiers.disk.chunk_file import disk_bytes
from lmcache_xpu.tiers.shared_values import value_name

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
PROMPTS, LONGEST, SMALL, LARGE = range(1, 5), 40, 24, 400  # chunks


class Anywhere(Asking):
    """A cache that is asked for what any tier has."""

    def in_memory(self, prompt: int) -> set[int]:
        objects = self.cache._storage._l1_manager._objects
        keys = self.keys(prompt, LONGEST).by_group[0]
        return {at for at, key in enumerate(keys) if key in objects}

    def hit(self, prompt: int, count: int) -> int:
        """Load what any tier has."""
        keys, number = self.keys(prompt, count), next(self._numbers)
        handle = self.cache.find(keys, count, in_memory=False)
        until(lambda: self.hit_of(handle) is not None)
        if hit := self.hits[handle]:
            assert self.cache.locate(number, chunks(keys, 0, hit)).result()
            self.cache.release(number)
        return hit


class Tiers(Anywhere):
    """A cache with room for so many chunks in memory and on disk."""

    def __init__(self, path: Path, memory: int, disk: int) -> None:
        options = LocalCacheOptions(
            chunk_tokens=CHUNK,
            cpu_gib=memory * OBJECT / 2**30,
            disk_path=path,
            disk_gib=disk * disk_bytes(OBJECT) / 2**30,
        )
        super().__init__(name=str(path), options=options)
        [(_, self.disk)] = self.cache._storage.l2_adapters()
        # Of two chunks that are written at once where room is left for one, either may be kept.
        self.disk._writes._threads._max_workers = 1

    def names(self, prompt: int) -> list[str]:
        return [object_name(key) for key in self.keys(prompt, LONGEST).by_group[0]]

    def on_disk(self, prompt: int) -> set[int]:
        return {at for at, name in enumerate(self.names(prompt)) if name in self.disk._store}

    def store(self, prompt: int, start: int, end: int) -> int:
        """Store chunks, and wait until the disk tier has taken or dropped them."""
        before, ended = self.on_disk(prompt), self._ended
        stored = super().store(prompt, start, end)
        rows = range(start, start + stored)
        until(lambda: self._ended >= ended + len(set(rows) - before))
        self.disk._looks.submit(lambda: None).result(10)
        return stored

    def forget_memory(self) -> None:
        storage = self.cache._storage
        until(lambda: storage.clear() or not storage._l1_manager._objects)

    @property
    def _ended(self) -> int:
        count = self.disk._store.counters
        return int(count["stored"] + count["dropped"] + self.disk._writes.dropped)

    def hit(self, prompt: int, count: int) -> int:
        hit = super().hit(prompt, count)
        self.disk._looks.submit(lambda: None).result(10)
        return hit


def is_beginning(numbers: set[int]) -> bool:
    return numbers == set(range(len(numbers)))


def opened(request: Any, memory: int, disk: int) -> Iterator[Tiers]:
    tiers = Tiers(request.getfixturevalue("tmp_path_factory").mktemp("disk"), memory, disk)
    yield tiers
    tiers.cache.close()


@pytest.fixture(scope="module")
def small_disk(request: Any) -> Iterator[Tiers]:
    yield from opened(request, memory=LARGE, disk=SMALL)


@pytest.fixture(scope="module")
def small_memory(request: Any) -> Iterator[Tiers]:
    yield from opened(request, memory=SMALL, disk=LARGE)


@pytest.fixture(scope="module")
def both_small(request: Any) -> Iterator[Tiers]:
    yield from opened(request, memory=SMALL, disk=2 * SMALL)


ACTS = st.lists(
    st.tuples(st.sampled_from(PROMPTS), st.integers(1, LONGEST), st.sampled_from([3, 8, 12])),
    max_size=6,
)


@settings(max_examples=12, deadline=None)
@given(acts=ACTS)
@example(acts=[(1, LONGEST, 8)])
@example(acts=[(1, 20, 8), (2, 12, 8), (1, 20, 8), (3, 8, 8)])
def test_what_the_disk_holds_of_a_prompt_is_its_beginning(small_disk, acts):
    """Without what memory holds, as after a restart of the engine."""
    tiers = small_disk
    assert tiers.cache.reset()
    for prompt, count, step in acts:
        tiers.forget_memory()
        tiers.compute(prompt, count, step)
        for each in PROMPTS:
            assert is_beginning(tiers.on_disk(each)), (each, tiers.on_disk(each))
        assert tiers.on_disk(prompt) >= set(range(min(count, SMALL)))


@settings(max_examples=12, deadline=None)
@given(acts=ACTS)
@example(acts=[(1, 20, 8), (2, 12, 8), (1, 20, 8), (3, 20, 8)])
def test_what_two_tiers_hold_of_a_prompt_is_its_beginning(both_small, acts):
    tiers = both_small
    assert tiers.cache.reset()
    for prompt, count, step in acts:
        tiers.compute(prompt, count, step)
        for each in PROMPTS:
            memory, disk = tiers.in_memory(each), tiers.on_disk(each)
            assert is_beginning(memory | disk), (each, memory, disk)


def test_a_hit_has_its_beginning_in_memory_and_its_end_on_disk(small_memory):
    tiers = small_memory
    tiers.compute(1, 20, 8)
    tiers.compute(2, 12, 8)
    assert tiers.in_memory(1) == set(range(12))
    assert tiers.on_disk(1) == set(range(20))
    assert tiers.hit(1, 20) == 20


def test_a_hit_has_its_beginning_on_disk_and_its_end_in_memory(small_memory):
    tiers = small_memory
    assert tiers.cache.reset()
    tiers.compute(1, 20, 8)
    beginning = tiers.keys(1, 12).by_group[0]
    tiers.cache._storage.delete_l1_keys(beginning)
    assert tiers.in_memory(1) == set(range(12, 20))
    assert tiers.hit(1, 20) == 20
    assert tiers.in_memory(1) == set(range(20))


class Shared(Anywhere):
    """A cache with room for so many chunks in memory, and a server that other engines share."""

    def __init__(self, server: Server, memory: int) -> None:
        gib = memory * OBJECT / 2**30
        options = LocalCacheOptions(chunk_tokens=CHUNK, cpu_gib=gib, remote_url=server.url)
        super().__init__(name=server.url, options=options)
        [(_, self.tier)] = self.cache._storage.l2_adapters()
        self.server = server.client

    def names(self, prompt: int) -> list[str]:
        keys = self.keys(prompt, LONGEST).by_group[0]
        return [value_name(key, self.cache._layouts[0]) for key in keys]

    def in_server(self, prompt: int) -> set[int]:
        return {at for at, name in enumerate(self.names(prompt)) if self.server.exists(name)}

    def store(self, prompt: int, start: int, end: int) -> int:
        """Store chunks, and wait until the server has them."""
        stored = super().store(prompt, start, end)
        until(lambda: set(range(start, start + stored)) <= self.in_server(prompt))
        return stored


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PASSWORD_VARIABLE, PASSWORD)
        patch.setattr(shared_l2, "LOOKUP_S", 30.0)  # a machine that pauses leaves no server alone
        server = Server()
        server.start()
        tiers = Shared(server, SMALL)
        yield tiers
        tiers.cache.close()
        server.stop()
        server.client.close()


@needs_server
@settings(max_examples=12, deadline=None)
@given(acts=ACTS, lost=st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, LONGEST))))
@example(acts=[(1, 20, 8), (2, 12, 8), (1, 20, 8), (3, 20, 8)], lost=[(1, 12), (2, 0)])
def test_what_memory_and_a_server_hold_of_a_prompt_is_its_beginning(shared, acts, lost):
    """Until the server evicts by rules of its own; then a hit is what is before the first gap."""
    shared.server.flushall()
    assert shared.cache.reset()
    for prompt, count, step in acts:
        shared.compute(prompt, count, step)
        for each in PROMPTS:
            memory, server = shared.in_memory(each), shared.in_server(each)
            assert is_beginning(memory | server), (each, memory, server)
            assert is_beginning(memory), (each, memory)
    for prompt, at in lost:
        shared.server.delete(*shared.names(prompt)[at : at + 1] or ["nothing"])
    for prompt in PROMPTS:
        held = shared.in_memory(prompt) | shared.in_server(prompt)
        before_gap = next(at for at in range(LONGEST + 1) if at not in held)
        assert shared.hit(prompt, LONGEST) == min(before_gap, SMALL)


@needs_server
def test_what_memory_is_hit_for_counts_as_used_in_the_server(shared):
    shared.server.flushall()
    assert shared.cache.reset()
    shared.compute(1, 8, 8)
    shared.compute(2, 8, 8)
    shared.server.config_set("maxmemory-policy", "allkeys-lru")

    def idle_s(prompt: int) -> set[int]:
        return {shared.server.object("idletime", name) for name in shared.names(prompt)[:8]}

    until(lambda: min(idle_s(1) | idle_s(2)) > 1)
    assert shared.in_memory(1) == set(range(8))
    assert shared.hit(1, 8) == 8
    until(lambda: max(idle_s(1)) < 2)
    assert min(idle_s(2)) > 1
