"""What LMCache's own engine sees of vLLM's steps."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from lmcache_xpu.stock.step import with_answers, without

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "vllm", "lmcache", "transformers")
]


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
