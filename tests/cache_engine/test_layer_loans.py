"""Layerwise loads of two ranks that hold the same: bytes of both, from one rank's tiers."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caches import bits
from support.chunk_files import file_of
from support.rank_pair import BLOCK, CHUNKS, GROUPS, LAYERS, LENGTH, THERE, Pair, Rank
from support.storage import TOKENS

PROMPT = list(range(LENGTH))
WAYS = ("steps", "beside", "waits")  # group by group, beside the engine's layers, without a step
FIRST, MIDDLE, LAST = range(GROUPS)
TIERS = ("memory", "disk")


def blocks(first: int) -> set[int]:
    """Those of the chunks from this one on."""
    return set((THERE[first * TOKENS :] // BLOCK).tolist())


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two ranks that have stored a prompt; what they lent has come back when a test ends."""
    with monkeypatch.context() as patch:  # what takes a second each time
        patch.setenv("LMCACHE_TRACK_USAGE", "false")
        patch.setattr(gc, "collect", lambda: 0)
        pair = Pair(tmp_path)
    try:
        pair.store(PROMPT)
        yield pair
        pair.first.engine.settle()
        assert pair.first.counts() <= {(1, False)}
        pair.first.leave_disk()
        assert (pair.first.in_use, pair.second.in_use) == (0, 0)
        assert all(queues[0].empty() for queues in pair.channels.queues)  # a message for each load
    finally:
        pair.close()


def check(rank: Rank, pair: Pair, chunks: int, cached: int = 0) -> None:
    """Every byte of a rank's KV cache: the first chunks, and nothing beside them."""
    assert torch.equal(bits(rank.cache.raw), bits(pair.wanted(chunks, cached)))


def place(pair: Pair, tier: str) -> None:
    """Leave what was stored in this tier alone, or in both."""
    if tier == "disk":
        pair.first.leave_disk()


@contextlib.contextmanager
def failing(rank: Rank, number: int) -> Iterator[None]:
    """A rank whose copies of this group fail."""
    stager = rank.connector._registration.register(None).stager
    load = stager.load

    def fail(pieces: Any, memory: Any, first_layer: int = 0, **options: Any) -> Any:
        if first_layer == rank.connector.groups[number][0]:
            raise RuntimeError("planted")
        return load(pieces, memory, first_layer, **options)

    stager.load = fail
    yield
    del stager.load


def test_one_rank_has_what_both_hold(pair: Pair):
    unique = CHUNKS * GROUPS * 4096  # LMCache's pages, of which one is enough
    assert pair.first.in_use == unique
    assert pair.second.in_use == 0
    assert pair.second.pool.get_keys() == []


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("way", WAYS)
def test_both_ranks_load_every_byte(pair: Pair, way: str, tier: str):
    place(pair, tier)
    for rank in pair.ranks:
        loaded, unfilled = pair.load_one(rank, PROMPT, way)
        assert loaded.all()
        assert unfilled == set()
        check(rank, pair, CHUNKS)


@pytest.mark.parametrize("way", WAYS)
def test_what_the_engines_have_themselves_is_left_alone(pair: Pair, way: str):
    cached = TOKENS + 5
    assert pair.load(PROMPT, way, cached) == [set(), set()]
    for rank in pair.ranks:
        check(rank, pair, CHUNKS, cached)


@pytest.mark.parametrize("number", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failed", [0, 1], ids=["first rank", "second rank"])
def test_copies_that_fail_on_one_rank_are_that_rank_s(
    pair: Pair, failed: int, way: str, number: int
):
    """Whatever group it is. Ranks tell each other later, see `StepLoads.share_failures`."""
    bad, good = pair.ranks[failed], pair.ranks[1 - failed]
    with failing(bad, number):
        unfilled = pair.load(PROMPT, way)
    assert unfilled[failed] == blocks(0)
    assert unfilled[1 - failed] == set()
    check(good, pair, CHUNKS)
    bad.cache.raw.zero_()
    assert pair.load(PROMPT, way) == [set(), set()]
    check(bad, pair, CHUNKS)


@pytest.mark.parametrize("number", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("tier", TIERS)
def test_a_chunk_that_lost_a_group_ends_the_load_on_both_ranks(pair: Pair, tier: str, number: int):
    """Behind the look-up, of which LMCache asks no more."""
    place(pair, tier)
    first = pair.first
    keys = first.engine._keys(PROMPT, None)
    lost = keys[1].split_layers(GROUPS)[number]
    if tier == "memory":
        first.pool.contains = lambda key, pin=False: True
        first.pool.batched_remove([lost])
    else:
        os.truncate(file_of(first.disk._store, first.disk._holdings.name(lost)), 1)
    assert pair.load(PROMPT, "beside") == [blocks(1), blocks(1)]
    wanted = bits(pair.wanted(1))
    assert torch.equal(bits(pair.second.cache.raw), wanted)
    # The first rank may have more of a chunk that counts as unfilled.
    held = (THERE[:TOKENS] // BLOCK).tolist()
    for layer in range(LAYERS):
        here, there = (rank.cache.truth[0][layer] for rank in pair.ranks)
        assert all(torch.equal(bits(here[block]), bits(there[block])) for block in held)


@pytest.mark.parametrize("number", [FIRST, MIDDLE, LAST])
def test_a_tier_that_raises_ends_the_load_on_both_ranks(pair: Pair, number: int):
    memory = pair.first.pool
    get, calls = memory.batched_get_non_blocking, []

    async def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number + 1:
            raise RuntimeError("planted")
        return await get(*args)

    memory.batched_get_non_blocking = fail
    assert pair.load(PROMPT, "beside") == [blocks(0), blocks(0)]
    assert len(calls) == GROUPS
    for rank in pair.ranks:
        check(rank, pair, 0)
    assert pair.first.counts() == {(1, False)}
    del memory.batched_get_non_blocking
    assert pair.load(PROMPT, "beside") == [set(), set()]


@pytest.mark.parametrize("chunks", [0, 2])
def test_what_is_gone_since_the_look_up_is_computed_on_both_ranks(pair: Pair, chunks: int):
    lost = [key.chunk_hash for key in pair.first.engine._keys(PROMPT, None)[chunks:]]
    memory = pair.first.pool
    memory.batched_remove([key for key in memory.get_keys() if key.chunk_hash in lost])
    pair.first.disk._store.clear()
    assert pair.load(PROMPT, "steps") == [blocks(chunks), blocks(chunks)]
    for rank in pair.ranks:
        check(rank, pair, chunks)


def test_a_first_rank_that_is_not_well_is_everybody_s_miss(pair: Pair):
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("planted")

    pair.first.engine.token_database.process_tokens = broken
    assert pair.load(PROMPT, "beside") == [blocks(0), blocks(0)]
    del pair.first.engine.token_database.process_tokens
    assert pair.load(PROMPT, "beside") == [set(), set()]


def test_ranks_that_load_different_requests_load_nothing_wrong(pair: Pair):
    assert pair.load_one(pair.first, PROMPT, "steps")[1] == set()
    loaded, unfilled = pair.load_one(pair.second, PROMPT[:-TOKENS], "steps")
    assert not loaded.any()
    assert unfilled == blocks(0) - blocks(2)
    check(pair.second, pair, 0)


def test_what_was_lent_stays_while_another_rank_reads_it(pair: Pair):
    mask = torch.ones(LENGTH, dtype=torch.bool)
    steps = [
        rank.engine.retrieve_layer(
            PROMPT, mask, kvcaches=rank.cache.engine, slot_mapping=THERE, vllm_cached_tokens=0
        )
        for rank in pair.ranks
    ]
    for rank in pair.ranks:
        rank.connector.overlap = None
    for each in steps:
        next(each)
    drain(steps[0])
    pair.first.leave_disk()
    pair.first.engine.settle()
    assert pair.first.in_use == CHUNKS * GROUPS * 4096
    drain(steps[1])
    check(pair.second, pair, CHUNKS)
    pair.first.engine.settle()
    assert pair.first.in_use == 0


def test_a_load_that_is_given_up_half_way_gives_back_what_it_borrowed(pair: Pair):
    pair.load_one(pair.first, PROMPT, "steps")
    pair.second.connector.overlap = None
    steps = pair.second.engine.retrieve_layer(
        PROMPT,
        torch.ones(LENGTH, dtype=torch.bool),
        kvcaches=pair.second.cache.engine,
        slot_mapping=THERE,
        vllm_cached_tokens=0,
    )
    for _ in range(3):
        next(steps)
    pair.first.engine.settle()
    assert pair.first.counts() == {(2, False)}
    steps.close()
    pair.first.engine.settle()
    assert pair.first.counts() == {(1, False)}


def test_loads_of_one_step_keep_apart(pair: Pair):
    """LMCache begins them one after the other, and goes through the layers with all of them."""
    lengths = (LENGTH, LENGTH - TOKENS)
    for rank in pair.ranks:
        rank.connector.overlap = None
        steps = [
            rank.engine.retrieve_layer(
                PROMPT[:length],
                torch.ones(length, dtype=torch.bool),
                kvcaches=rank.cache.engine,
                slot_mapping=THERE[-length:] if number else THERE,
                vllm_cached_tokens=0,
            )
            for number, length in enumerate(lengths)
        ]
        for each in steps:
            next(each)
            next(each)
        for _ in range(LAYERS):
            assert all(next(each, None) is not None for each in steps)
        for each in steps:
            drain(each)
        assert rank.unfilled.take() == set()
    assert torch.equal(bits(pair.first.cache.raw), bits(pair.second.cache.raw))
    assert pair.first.cache.raw.any()


def test_a_second_rank_stores_and_takes_back_nothing(pair: Pair):
    steps = list(pair.second.engine.store_layer(PROMPT, slot_mapping=THERE, offset=0))
    assert len(steps) == LAYERS + 1
    pair.second.engine.take_back(PROMPT)
    assert pair.second.pool.get_keys() == []
    assert len(pair.first.pool.get_keys()) == CHUNKS * GROUPS


def drain(steps: Iterator[Any]) -> None:
    for _ in steps:
        pass
