"""Ranks are given one CPU tier: processes of a real group, real memory, LMCache's allocator."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from torch import distributed

from lmcache_xpu.cache_engine.health import pool
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import pool_sharing
from lmcache_xpu.tiers.shard import Shard
from lmcache_xpu.transfer.pool_memory import SharedMemory

SHAPE = torch.Size([1, 2, 4, 64])
RANKS = 4  # of two KV heads: two groups of two


def start(rank: int, store: str) -> Any:
    """LMCache's engine of a rank, as far as it matters here."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    group = SimpleNamespace(ranks=list(range(RANKS)), rank_in_group=rank)
    pool_sharing.get_tp_group = lambda: group
    backend = SimpleNamespace(
        memory_allocator=SimpleNamespace(buffer=SharedMemory.make(64 * 4096).tensor)
    )
    return SimpleNamespace(
        storage_manager=SimpleNamespace(storage_backends={"LocalCPUBackend": backend}),
        gpu_connector=SimpleNamespace(pin=lambda memory: None),
        lender=None,
        borrower=None,
    )


def lend_and_borrow(rank: int, store: str, answers: Any) -> None:
    engine = start(rank, store)
    allocator = TensorMemoryAllocator(pool(engine))
    shard = Shard.of_rank(rank, RANKS, 2, divisible=True)
    pool_sharing.share_pool(engine, shard)
    said = []
    for turn in range(3):
        if engine.lender is not None:
            obj = allocator.allocate(SHAPE, torch.bfloat16, MemoryFormat.KV_MLA_FMT)
            obj.tensor.fill_(10 * rank + turn)
            engine.lender.lend(turn % 2, str(turn), [obj], [0], [4])
            obj.ref_count_down()
        else:
            [obj], _, _ = engine.borrower.borrow(turn % 2, str(turn))
            said.append(obj.tensor.unique().tolist())
            obj.ref_count_down()
    distributed.barrier()
    if engine.lender is not None:
        engine.lender.settle()
        said.append(allocator.total_allocated_size)
    answers.put((rank, said))
    distributed.barrier()
    distributed.destroy_process_group()


def refuse(rank: int, store: str, answers: Any) -> None:
    engine = start(rank, store)
    shard = Shard.of_rank(rank, RANKS, 2, divisible=True)
    if rank == 3:

        def closed(path: Any, *args: Any) -> int:
            raise PermissionError(13, "Permission denied", path)

        os.open = closed
    try:
        pool_sharing.share_pool(engine, shard)
        answers.put((rank, ""))
    except SettingsError as error:
        answers.put((rank, str(error)))
    distributed.barrier()
    distributed.destroy_process_group()


def run(target: Any, store: Path) -> dict[int, Any]:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=target, args=(rank, str(store), answers)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    said = dict(answers.get() for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return said


def test_each_group_has_the_chunks_of_its_first_rank(tmp_path: Path):
    said = run(lend_and_borrow, tmp_path / "store")
    assert said == {0: [0], 1: [[0.0], [1.0], [2.0]], 2: [0], 3: [[20.0], [21.0], [22.0]]}


def test_memory_that_can_not_be_mapped_is_refused_by_the_ranks_that_would_share_it(tmp_path: Path):
    said = run(refuse, tmp_path / "store")
    assert (said[0], said[1]) == ("", "")
    assert "xpu.share_cpu_tier" in said[2]
    assert "Permission denied" in said[3]
