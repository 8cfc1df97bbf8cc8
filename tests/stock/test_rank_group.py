"""What ranks tell each other: processes of a real group, on this host."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from torch import distributed

from lmcache_xpu.stock.rank_group import RankGroup

NUMBERS = [[{1, 5}, set()], [set(), set()], [{2}, {3, 2}]]  # by exchange, by rank


def exchange(rank: int, store: str, answers) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = RankGroup(distributed.group.WORLD)
    answers.put((rank, [sorted(group.union(numbers[rank])) for numbers in NUMBERS]))
    distributed.destroy_process_group()


def test_each_rank_hears_of_all_numbers(tmp_path: Path):
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
