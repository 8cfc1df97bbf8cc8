"""The disk tier's writes: what is refused, what is waited for, what ends with it."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from lmcache.v1.memory_management import TensorMemoryObj
from support.storage import (
    CHUNK,
    SHAPE,
    TOKENS,
    content,
    make_key,
)

from lmcache_xpu.tiers.disk import chunk_store


def refuse(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_chunk_and_one_line(engines, log, monkeypatch):
    engine = engines()
    engine.store([0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        engine.store(range(1, 6))
    assert engine.pool_in_use == 0
    assert engine.load([0]) == [0]
    assert engine.load([1]) == []
    assert len([line for line in log if "No space left" in line]) == 1
    assert engine.dropped == 5
    engine.store(range(1, 6))  # room again
    assert engine.load(range(6)) == [0, 1, 2, 3, 4, 5]


def test_who_waits_for_a_write_may_store_the_chunk_again(engines, monkeypatch):
    """A failed write that still counted as queued would have the next store skipped."""
    engine = engines()
    go = threading.Event()
    let_go = TensorMemoryObj.ref_count_down
    monkeypatch.setattr(chunk_store, "write_chunk", lambda *args: (go.wait(10), refuse()))
    monkeypatch.setattr(
        TensorMemoryObj, "ref_count_down", lambda self: (time.sleep(0.1), let_go(self))
    )
    engine.store([0], wait=False)
    [write] = engine.tier._writes.pending.values()
    go.set()
    write.result(10)
    assert not engine.tier.exists_in_put_tasks(make_key(0))


def test_queued_writes_hold_at_most_half_the_pool(engines, log, monkeypatch):
    engine = engines(pool_chunks=20, **{"disk.threads": 1})
    go = threading.Event()
    write = chunk_store.write_chunk
    monkeypatch.setattr(chunk_store, "write_chunk", lambda *a: (go.wait(10), write(*a)))
    engine.store(range(14), wait=False)
    assert engine.pool_in_use == 10 * CHUNK
    assert engine.tier.exists_in_put_tasks(make_key(0))
    assert not engine.tier.contains(make_key(0))
    engine.store([0, 20], wait=False)  # 0 is on its way already
    assert engine.pool_in_use == 10 * CHUNK
    go.set()
    engine.settle()
    assert engine.pool_in_use == 0
    assert engine.load(range(14)) == list(range(10))
    assert engine.dropped == 5
    assert [line for line in log if "slower" in line] != []


def test_a_stored_chunk_is_not_written_again(engines):
    engine = engines()
    engine.store([0])
    engine.store([0])
    assert engine.counters["stored"] == 1


def test_serialised_and_blended_chunks_are_not_stored(engines):
    engine = engines()
    obj = engine.allocate(content(0))
    obj.metadata.cached_positions = torch.arange(TOKENS)
    engine.manager.batched_put([make_key(0)], [obj])
    engine.settle()
    assert not engine.tier.contains(make_key(0))
    assert engine.dropped == 1


def test_close_ends_the_writes_before_the_pool_is_freed(engines, monkeypatch):
    """LMCache closes the pool first; a write after that would store freed memory as valid."""
    engine = engines()
    freed_at_write = []
    write = chunk_store.write_chunk

    def slow(*args):
        time.sleep(0.05)
        freed_at_write.append(engine.pool.memory_allocator._unregistered)
        write(*args)

    monkeypatch.setattr(chunk_store, "write_chunk", slow)
    engine.store(range(6), wait=False)
    engine.close()
    assert freed_at_write == [False] * 6
    assert engines().load(range(6)) == list(range(6))


def test_what_cannot_be_written_in_time_is_let_go(engines, monkeypatch):
    engine = engines(**{"disk.threads": 1})
    monkeypatch.setattr("lmcache_xpu.tiers.disk.writer._DRAIN_SECONDS", 0.1)
    write = chunk_store.write_chunk
    monkeypatch.setattr(chunk_store, "write_chunk", lambda *a: (time.sleep(0.3), write(*a)))
    engine.store(range(6), wait=False)
    engine.close()
    assert engine.pool_in_use == 0
    assert engine.counters["stored"] == 1
    assert engine.dropped == 5


def test_after_close_nothing_is_stored_or_found(engines):
    engine = engines()
    engine.store([0])
    obj = engine.allocate(content(1))
    engine.tier.close()
    engine.tier.close()
    engine.tier.batched_submit_put_task([make_key(1)], [obj])
    assert obj.get_ref_count() == 1
    obj.ref_count_down()
    assert engine.tier.batched_get_blocking([make_key(0), make_key(1)]) == [None, None]


def test_stores_and_loads_at_once_neither_mix_nor_stop(engines):
    engine = engines(chunks=20, pool_chunks=40)

    def work(seed):
        for turn in range(25):
            numbers = [(seed * 7 + turn * 3 + i) % 30 for i in range(4)]
            keys = [make_key(n) for n in numbers]
            objs = []
            for number in numbers:
                obj = engine.manager.allocate(SHAPE, torch.bfloat16, busy_loop=False)
                if obj is None:
                    break
                obj.tensor.copy_(content(number))
                objs.append(obj)
            engine.manager.batched_put(keys[: len(objs)], objs)
            hits, _ = engine.manager.batched_contains(keys, pin=True)
            engine.load(numbers[:hits])
            engine.manager.batched_unpin(keys[:hits], ["disk"])
            if turn % 5 == 0:
                engine.tier.remove(keys[0])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6), timeout=60))  # raises what a thread raised
    engine.settle()
    assert engine.pool_in_use == 0
    assert engine.counters["bytes"] <= 20 * (CHUNK + 4096)
    assert engine.counters["corrupt"] == 0
