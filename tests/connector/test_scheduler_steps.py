"""The scheduler's half: what the workers are told of a step, and when locks end."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from support.scheduling import BLOCK, CHUNK, HIT, blocks, maker, request, step

from lmcache_xpu.connector.load_policy import LoadPolicy
from lmcache_xpu.connector.step import WorkerReport


@pytest.fixture
def make(monkeypatch):
    return maker(monkeypatch)


# Blocks and locks


def test_chunks_that_nobody_loads_are_unlocked(make):
    for tokens, kept, unlocked in ((768, 0, 0), (468, 300, 288), (0, 800, 768)):
        half = make()
        half.matched_tokens(request(), kept)
        half.allocated(request(), blocks(63), tokens)
        assert ("release", 0, unlocked) in half._lookups.calls
        assert ("forget", "a") in half._lookups.calls


def test_a_hit_that_is_computed_unlocks_all_and_is_not_stored_again(make, monkeypatch):
    half = make()
    half.load_in_steps()
    monkeypatch.setattr(LoadPolicy, "computes", lambda *_: True)
    assert half.matched_tokens(request(1100), 0) == (0, False)
    half.allocated(request(1100), blocks(69), 0)
    assert ("release", 0, 768) in half._lookups.calls
    told = half.describe(step(("a", 0, 1100)))
    assert (told.computed_hits, told.loads, told.waiting) == (1, [], [])
    assert [(store.start, store.end) for store in told.stores] == [(768, 1024)]


def test_a_load_names_the_chunks_that_vllm_lacks(make):
    half = make()
    half.matched_tokens(request(), 300)
    half.allocated(request(), blocks(63), 468)
    [load] = half.describe(step()).waiting
    assert (load.request_id, load.start, load.end, load.kept) == ("a", 256, 768, 32)
    assert load.blocks == [list(range(17, 49))]
    assert (load.salt, len(load.tokens)) == ("salt 1", 1000)
    assert half.describe(step()).waiting == []  # told once


# Stores


def stored(half, *steps):
    """Chunks that steps store: (first token, the one behind the last)."""
    half._lookups.hit = 0
    return [[(store.start, store.end) for store in half.describe(each).stores] for each in steps]


def test_a_prompt_is_stored_chunk_by_chunk_as_it_is_computed(make):
    half = make()
    half._lookups.hit = 0
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(32), 0)
    more = (list(range(40, 71)),)
    steps = (
        step(("a", 0, 300)),
        step(cached=[("a", 300, 212, None)]),
        step(cached=[("a", 512, 488, more)]),
    )
    assert stored(half, *steps) == [[(0, 256)], [(256, 512)], [(512, 768)]]


@pytest.mark.parametrize(("answers", "end"), [(False, 512), (True, 768)])
def test_answers_are_stored_where_that_was_chosen(make, answers, end):
    half = make(answers=answers)
    half._lookups.hit = 0
    asked = request(800, prompt=600)
    half.matched_tokens(asked, 0)
    half.allocated(asked, blocks(60), 0)
    assert stored(half, step(("a", 0, 800))) == [[(0, end)]]


def test_no_more_is_stored_than_there_are_blocks_for(make):
    half = make()
    half._lookups.hit = 0
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(20), 0)
    assert stored(half, step(("a", 0, 1000))) == [[(0, 256)]]


@pytest.mark.parametrize("why", ["client", "name", "consumer", "failed", "reset"])
def test_some_requests_store_nothing(make, why):
    half = make(producer=why != "consumer")
    half._lookups.hit = 0
    half._keys.stores = why != "name"
    asked = request(options={"lmcache.max_offload_tokens": 0} if why == "client" else None)
    half.matched_tokens(asked, 0)
    half.allocated(asked, blocks(63), 0)
    if why == "failed":
        half.end_step(WorkerReport({"a"}), {"a"})
    if why == "reset":
        assert half.reset()
    assert stored(half, step(("a", 0, 1000))) == [[]]


def test_a_store_names_what_it_was_computed_from_where_loads_are_inside_steps(make):
    for allowed, sources in ((False, {}), (True, {"a": list(range(1, 49))})):
        half = make()
        half._lookups.hit = 0
        if allowed:
            half.load_in_steps()
        half.matched_tokens(request(), 0)
        half.allocated(request(), blocks(63), 0)
        assert half.describe(step(("a", 0, 1000))).sources == sources


def windows_first(half):
    """Let the second group alone keep all of a prompt; its blocks begin at 101."""
    whole = half._whole
    half._whole = dataclasses.replace(whole, number=1)
    return SimpleNamespace(get_block_ids=lambda: ([0] * 63, list(range(101, 164))))


def test_of_several_groups_a_store_names_the_blocks_that_no_window_gives_back(make):
    half = make(groups=2)
    blocks = windows_first(half)
    half.load_in_steps()
    half._lookups.hit = 0
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks, 0)
    assert half.describe(step(("a", 0, 1000))).sources == {"a": list(range(101, 149))}


def test_of_several_groups_a_load_that_nobody_described_names_them_too(make):
    """By them vLLM's scheduler knows its request."""
    half, asks = make(groups=2), request()
    blocks = windows_first(half)
    half.load_in_steps()
    half.matched_tokens(asks, CHUNK)
    half.allocated(asks, blocks, HIT - CHUNK)
    unserved = half.describe_failed(step(("a", HIT, 232))).unserved
    assert unserved.blocks == set(range(101 + CHUNK // BLOCK, 101 + HIT // BLOCK))


def test_damage_is_told_to_who_names_chunks(make):
    half = make()
    half.end_step(WorkerReport(damaged={"a"}), ())
    assert ("damaged", "a") in half._keys.told


def test_a_reset_lets_requests_that_are_looked_up_ask_anew(make):
    half = make()
    half._lookups.hit = None
    half.matched_tokens(request(), 0)
    assert half.reset()
    half.matched_tokens(request(), 0)
    assert half._keys.begun == 2


def test_a_request_that_ends_leaves_nothing(make):
    half = make()
    half.matched_tokens(request(), 0)
    half.finished(request())
    assert not half._requests
    assert ("end", "a") in half._lookups.calls


# A worker in this process


def test_it_begins_a_step_that_loads(make):
    for worker in (True, False):
        half = make(worker=worker, loads="step")
        half.load_in_steps()
        half.describe(step())
        assert half.beside.begun == []
        half.matched_tokens(request(), 0)
        half.allocated(request(), blocks(63), 768)
        told = half.describe(step(("a", 768, 232)))
        assert [load.end for load in told.loads] == [768]
        assert half.beside.begun == ([told] if worker else [])


def test_the_connection_ends_with_the_connector(make):
    half = make()
    half.shutdown()
    half._client.close.assert_called_once_with()
