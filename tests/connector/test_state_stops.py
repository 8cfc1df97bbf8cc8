"""Where steps end so that states can be hit again; end to end in engine/test_local.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_xpu.connector.state_stops import StateStops


def stops(
    tokens: int, block: int, *, start: int = 0, shared: int = 0, of_vllm: int = 0
) -> list[int]:
    """The ends of steps that a prompt of so many tokens is computed in, one after another."""
    request = SimpleNamespace(
        request_id="r", num_prompt_tokens=tokens, shared_prefix_boundary=of_vllm
    )
    chosen, computed = StateStops(block), start
    chosen.begin(request, start, shared)
    ends = []
    while request.shared_prefix_boundary > computed:
        computed = request.shared_prefix_boundary
        ends.append(computed)
        chosen.go_on(request, computed)
    return ends


@pytest.mark.parametrize("document", [1900, 2304, 20_000])
@pytest.mark.parametrize("block", [128, 528, 784, 1664])
def test_another_question_hits_all_whole_blocks_of_its_document(document, block):
    prompt = document + 200
    ends = [*stops(prompt, block), prompt // block * block]  # vLLM's own, the last
    assert document // block * block in [0, *ends]
    assert len(ends) <= 3


def test_small_blocks_make_no_small_steps():
    assert stops(2100, 16) == [1840, 1968]
    assert stops(2100, 48) == [1920]


def test_what_a_cache_has_of_attention_and_what_vllm_has_found_are_stops_too():
    assert stops(2100, 128, shared=640, of_vllm=384) == [384, 640, 1792, 1920]


def test_nothing_that_is_not_computed_is_a_stop():
    assert stops(2100, 128, start=1792, shared=640) == [1920]
    assert stops(2100, 128, start=1920) == []


def test_a_prompt_of_few_blocks_is_computed_at_once():
    assert stops(100, 128) == []
    assert stops(1000, 784) == []


def test_a_request_that_was_not_begun_or_has_ended_keeps_what_vllm_has_set():
    request = SimpleNamespace(request_id="r", num_prompt_tokens=2100, shared_prefix_boundary=7)
    chosen = StateStops(128)
    chosen.go_on(request, 0)
    assert request.shared_prefix_boundary == 7
    chosen.begin(request, 0, 0)
    chosen.finished("r")
    request.shared_prefix_boundary = 7
    chosen.go_on(request, 0)
    assert request.shared_prefix_boundary == 7
