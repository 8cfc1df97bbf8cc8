from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace as Fake

import pytest

pytest.importorskip("vllm")

from support.steps import step
from vllm.model_executor.layers.attention import (
    Attention,
    ChunkedLocalAttention,
    MLAAttention,
)

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.connector.request_guard import Unserved
from lmcache_xpu.connector.step import (
    Step,
    WorkerReport,
    awaiting_layers,
    may_run_as_one_graph,
    written_blocks,
)


@pytest.mark.parametrize(
    ("before", "blocks"),
    [
        (step(new=[("a", [5, 6, 7], 0)]), {5, 6, 7}),
        (step(new=[("a", [5, 6, 7], 32)]), {7}),  # 5 and 6 are shared
        (step(new=[("a", [5, 6, 7], 40)]), {7}),  # so is part of 7, and the rest is written
        (step(cached=[("a", [9], 100, False)]), {9}),
        (step(cached=[("a", None, 100, False)]), set()),
        (step(cached=[("a", [5, 6, 9], 32, True)]), {9}),  # resumed: gets all anew
        (step(new=[("a", [1], 0)], cached=[("b", [2], 50, False)]), {1, 2}),
    ],
)
def test_blocks_that_are_written_for_the_first_time(before, blocks):
    assert written_blocks(before, [16]) == blocks


def test_each_group_has_blocks_of_its_own_size_and_one_without_tokens_writes_all():
    output = step(new=[("a", [], 256)])
    output.scheduled_new_reqs[0].block_ids = ([1, 2, 3], [5, 0, 7, 8, 9], [4])
    assert written_blocks(output, [128, 64, 0]) == {3, 9, 4}
    assert written_blocks(output, itertools.repeat(64)) == {9}


def test_a_load_writes_its_blocks_but_those_that_the_engine_has():
    load = TokenRange("a", (), 0, 384, blocks=[[4, 5, 6], [0, 0, 9]], kept=128)
    assert written_blocks(step(), [128, 128], [load]) == {5, 6, 9}


def test_layers_that_vllm_calls_connectors_for_are_in_the_order_of_the_model():
    """A layer of another class may have a KV cache too."""

    class Indexer:
        pass

    classes = {"b": Attention, "index": Indexer, "a": MLAAttention, "c": ChunkedLocalAttention}
    layers = {name: each.__new__(each) for name, each in classes.items()}
    config = Fake(compilation_config=Fake(static_forward_context=layers))
    assert awaiting_layers(config) == ["b", "a", "c"]


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


@pytest.mark.parametrize(
    ("mode", "runtime", "tokens", "one_graph"),
    [
        ("FULL_AND_PIECEWISE", "PIECEWISE", None, False),  # the older runner has decided
        ("FULL_AND_PIECEWISE", "FULL", None, True),
        ("FULL_AND_PIECEWISE", None, [1, 1], True),  # the newer one: as in a decode batch
        ("FULL_AND_PIECEWISE", None, [1, 200], False),
        ("FULL_AND_PIECEWISE", None, [], True),
        ("FULL", None, [200], True),
        ("FULL_DECODE_ONLY", None, [200], False),
        ("FULL_DECODE_ONLY", None, [1], True),
        ("PIECEWISE", None, [1], False),
        ("NONE", None, [1], False),
    ],
)
def test_a_step_that_may_run_as_one_graph(mode, runtime, tokens, one_graph):
    from vllm.config import CUDAGraphMode

    config = Fake(
        compilation_config=Fake(cudagraph_mode=CUDAGraphMode[mode]),
        num_speculative_tokens=0,
    )
    if runtime is not None:
        context = Fake(attn_metadata={}, cudagraph_runtime_mode=CUDAGraphMode[runtime])
        arguments = {}
    else:
        context = Fake(attn_metadata={}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        numbers = {str(number): count for number, count in enumerate(tokens)}
        arguments = {
            "attn_metadata": {},
            "scheduler_output": Fake(num_scheduled_tokens=numbers),
        }
    assert may_run_as_one_graph(config, context, arguments) is one_graph


def test_speculative_decoding_makes_uniform_steps_longer():
    from vllm.config import CUDAGraphMode

    config = Fake(
        compilation_config=Fake(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        num_speculative_tokens=3,
    )
    context = Fake(attn_metadata=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    for count, wanted in ((4, True), (5, False)):
        arguments = {"scheduler_output": Fake(num_scheduled_tokens={"a": count})}
        assert may_run_as_one_graph(config, context, arguments) is wanted
