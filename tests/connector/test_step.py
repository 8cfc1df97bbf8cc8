from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.connector.promises import Unserved
from lmcache_xpu.connector.step import Step, WorkerReport, written_blocks


def step(new=(), cached=()):
    names, blocks, computed, resumed = zip(*cached, strict=True) if cached else ([], [], [], [])
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=ids, num_computed_tokens=tokens) for ids, tokens in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            new_block_ids=blocks,
            num_computed_tokens=computed,
            resumed_req_ids={
                name for name, is_resumed in zip(names, resumed, strict=True) if is_resumed
            },
        ),
    )


def test_a_new_request_writes_no_block_of_the_prefix_that_it_shares():
    output = step(new=[(([1, 2, 3, 4], [5, 0, 6, 7]), 256)])
    assert written_blocks(output, [], [128, 128]) == {3, 4, 6, 7}


def test_a_running_request_writes_new_blocks_and_a_resumed_one_all_that_are_not_cached():
    cached = [("a", ([8],), 512, False), ("b", None, 512, False), ("c", ([1, 2, 3],), 128, True)]
    assert written_blocks(step(cached=cached), [], [128]) == {8, 2, 3}


def test_a_load_writes_its_blocks_but_those_that_the_engine_has():
    load = TokenRange("a", (), 0, 384, blocks=[[4, 5, 6], [0, 0, 9]], kept=128)
    assert written_blocks(step(), [load], [128, 128]) == {5, 6, 9}


def test_groups_without_tokens_write_all_of_theirs():
    assert written_blocks(step(new=[(([1, 2], [3]), 128)]), [], [128, 0]) == {2, 3}


def test_reports_of_workers_are_one():
    both = WorkerReport({"a"}, {"a"}).aggregate(WorkerReport({"b"}))
    assert (both.requests, both.damaged) == ({"a", "b"}, {"a"})


def test_a_step_reaches_a_worker_in_another_process():
    chunks = TokenRange("a", b"12", 0, 2, "salt", {"b": 1}, [[1], [2]], 1)
    sent = Step(frozenset({3}), 4, [chunks], [chunks], [chunks], {"a": [5]}, 6, 7)
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_a_step_writes_the_blocks_of_loads_that_nobody_described():
    unserved = Unserved(frozenset({4}), {"a": frozenset({5})})
    assert Step(frozenset({3}), 1, unserved=unserved).written == {3, 4, 5}
