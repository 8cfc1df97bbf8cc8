"""What is read of vLLM's steps."""

from __future__ import annotations

from types import SimpleNamespace as Fake

import pytest
from support.steps import step
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from lmcache_xpu.connector.step_metadata import (
    may_run_as_one_graph,
    with_answers,
    without,
    written_blocks,
)

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "vllm", "lmcache", "transformers")
]


@pytest.mark.parametrize(
    ("before", "kept", "blocks"),
    [
        (step(new=[("a", [5, 6, 7], 0)]), {}, {5, 6, 7}),
        (step(new=[("a", [5, 6, 7], 32)]), {}, {7}),  # 5 and 6 are shared
        (step(new=[("a", [5, 6, 7], 40)]), {}, {7}),  # so is part of 7, and the rest is written
        (step(new=[("a", [5, 6, 7], 32)]), {"a": 16}, {6, 7}),  # 6 is loaded
        (step(cached=[("a", [9], 100, False)]), {}, {9}),
        (step(cached=[("a", None, 100, False)]), {}, set()),
        (step(cached=[("a", [5, 6, 9], 32, True)]), {}, {9}),  # resumed: gets all anew
        (step(cached=[("a", [5, 6, 9], 32, True)]), {"a": 0}, {5, 6, 9}),
        (step(new=[("a", [1], 0)], cached=[("b", [2], 50, False)]), {}, {1, 2}),
    ],
)
def test_blocks_that_are_written_for_the_first_time(before, kept, blocks):
    assert written_blocks(before, 16, kept) == blocks


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
        compilation_config=Fake(cudagraph_mode=CUDAGraphMode[mode]), num_speculative_tokens=0
    )
    if runtime is not None:
        context = Fake(attn_metadata={}, cudagraph_runtime_mode=CUDAGraphMode[runtime])
        arguments = {}
    else:
        context = Fake(attn_metadata={}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        numbers = {str(number): count for number, count in enumerate(tokens)}
        arguments = {"attn_metadata": {}, "scheduler_output": Fake(num_scheduled_tokens=numbers)}
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


def new_request(name: str, prompt: list[int], prefill: list[int] | None) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=prefill,
    )


def test_lmcache_sees_the_answers_of_requests_that_the_newer_runner_resumes():
    seen = SchedulerOutput.make_empty()
    seen.scheduled_new_reqs = [
        new_request("resumed", [1, 2], [1, 2, 3]),
        new_request("new", [1, 2], [1, 2]),
        new_request("other runner's", [1, 2], None),
    ]
    told = with_answers(seen)
    assert [new.prompt_token_ids for new in told.scheduled_new_reqs] == [[1, 2, 3], [1, 2], [1, 2]]
    # vLLM's own description stays as it is.
    assert seen.scheduled_new_reqs[0].prompt_token_ids == [1, 2]


def test_a_step_without_such_requests_is_not_copied():
    seen = SchedulerOutput.make_empty()
    seen.scheduled_new_reqs = [new_request("new", [1, 2], [1, 2])]
    assert with_answers(seen) is seen


def cached_step(
    rows: dict[str, tuple[int, int]],
    *,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    """A step of requests that are known: by name, tokens answered and tokens scheduled."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(rows),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([number],) for number, _ in enumerate(rows)],
        num_computed_tokens=[100 + number for number, _ in enumerate(rows)],
        num_output_tokens=[answered for answered, _ in rows.values()],
    )
    step.num_scheduled_tokens = {name: tokens for name, (_, tokens) in rows.items()}
    step.finished_req_ids = set(finished)
    return step


def test_who_is_left_out_and_others_keep_what_is_theirs():
    seen = cached_step({"a": (1, 1), "b": (0, 256), "c": (7, 1)})
    cached = without(seen, {"a", "c", "unknown"}).scheduled_cached_reqs
    assert cached.req_ids == ["b"]
    assert (cached.new_block_ids, cached.num_computed_tokens) == ([([1],)], [101])
    assert cached.num_output_tokens == [0]
    assert without(seen, {"unknown"}) is seen
