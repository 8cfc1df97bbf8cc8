"""Which blocks a load left unfilled, until they are given away."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from lmcache_xpu import metrics
from lmcache_xpu.stock.unfilled_blocks import UnfilledBlocks

BLOCK = 4
SLOTS = torch.arange(24) + 10 * BLOCK  # blocks 10 to 15


def test_they_are_reported_once():
    unfilled = UnfilledBlocks(BLOCK)
    unfilled.add_slots(SLOTS[:5])
    unfilled.add({3})
    assert unfilled.take() == {3, 10, 11}
    assert unfilled.take() == set()


@pytest.mark.parametrize(
    ("new_blocks", "spoilt"),
    [(frozenset(), True), (frozenset({14}), True), (frozenset({15}), False)],
)
def test_nothing_is_stored_from_one_until_it_is_given_away(new_blocks, spoilt):
    """With asynchronous scheduling the next step was on its way when the load failed."""
    unfilled = UnfilledBlocks(BLOCK)
    unfilled.add_slots(SLOTS[-BLOCK:])
    unfilled.withhold()
    assert unfilled.spoil(SLOTS)
    assert not unfilled.spoil(SLOTS[:-BLOCK])
    assert unfilled.take() == {15}
    unfilled.begin_step(new_blocks)
    assert unfilled.spoil(SLOTS) == spoilt
    assert unfilled.take() == set()  # vLLM knows of it


def test_what_is_reported_again_is_no_other_failure():
    unfilled = UnfilledBlocks(BLOCK)
    metrics.take()
    for blocks in ({1, 2}, {2}, {3}):
        unfilled.add(blocks)
        unfilled.withhold()
    counts, _ = metrics.take()
    assert counts == {"fallbacks load": 2}


def test_a_failed_load_says_why_and_leaves_out_what_the_engine_has(caplog):
    unfilled = UnfilledBlocks(BLOCK)
    load = {"slot_mapping": SLOTS, "vllm_cached_tokens": 9}
    unfilled.add_load("5 of 20 tokens", load, 4)
    assert unfilled.take() == {12, 13, 14, 15}
    assert "A load failed and is computed instead: 5 of 20 tokens" in caplog.text


def test_a_refused_step_loads_and_stores_nothing_and_reports_what_it_lacks():
    def described(slots: range, **spec: Any) -> Any:
        return SimpleNamespace(
            slot_mapping=torch.arange(slots.start, slots.stop),
            load_spec=SimpleNamespace(**spec),
            save_spec=SimpleNamespace(can_save=True),
        )

    loads = described(range(40, 56), vllm_cached_tokens=4, lmcache_cached_tokens=12, can_load=True)
    waits = described(range(80, 96), vllm_cached_tokens=0, lmcache_cached_tokens=12, can_load=False)
    nothing = SimpleNamespace(load_spec=None, save_spec=None, slot_mapping=torch.empty(0))
    unfilled = UnfilledBlocks(BLOCK)
    unfilled.refuse([loads, waits, nothing])
    assert unfilled.take() == {11, 12}  # not 10, which vLLM has itself
    assert [request.load_spec for request in (loads, waits)] == [None, None]
    assert [request.save_spec.can_save for request in (loads, waits)] == [False, False]


NUMBERS = [[{1, 5}, set()], [set(), set()], [{2}, {3, 2}]]  # by exchange, by rank


def exchange(rank: int, store: str, answers) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shared = []
    for numbers in NUMBERS:
        unfilled = UnfilledBlocks(BLOCK)
        unfilled.add(numbers[rank])
        unfilled.withhold()
        unfilled.share(distributed.group.WORLD)
        shared.append(sorted(unfilled._unfilled))
        assert unfilled.take() == numbers[rank]  # each rank reports its own
    answers.put((rank, shared))
    distributed.destroy_process_group()


def test_each_rank_stores_nothing_from_what_another_one_lacks(tmp_path: Path):
    """Ranks are processes of a real group, on this host."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    ranks = [
        spawn.Process(target=exchange, args=(rank, str(tmp_path / "store"), answers))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    union = [[1, 5], [], [2, 3]]
    assert sorted(answers.get() for _ in ranks) == [(0, union), (1, union)]
