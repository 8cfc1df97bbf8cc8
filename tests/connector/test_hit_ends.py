"""What is kept so that a later prompt can be hit; end to end in engine/test_local.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.connector.hit_ends import HitEnds
from lmcache_xpu.model.kv_cache_groups import CacheGroup


def states(block: int) -> HitEnds:
    group = CacheGroup(number=0, layers=("0",), block_tokens=block, window=block, recurrent=True)
    return HitEnds([group], block)


def stops(
    tokens: int, block: int, *, start: int = 0, shared: int = 0, of_vllm: int = 0
) -> list[int]:
    """The ends of steps that a prompt of so many tokens is computed in, one after another."""
    request = SimpleNamespace(
        request_id="r", num_prompt_tokens=tokens, shared_prefix_boundary=of_vllm
    )
    chosen, computed = states(block), start
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


def test_no_step_ends_early_where_the_question_is_behind_the_last_whole_block():
    assert stops(2 * 784 + 255, 784) == [784]
    assert stops(2 * 784 + 256, 784) == []
    assert stops(1584 + 200, 528) == [1056]


def test_steps_end_where_a_cache_s_attention_ends_and_where_vllm_has_chosen():
    assert stops(2100, 128, shared=640, of_vllm=384) == [384, 640, 1792, 1920]


def test_nothing_that_is_not_computed_is_a_stop():
    assert stops(2100, 128, start=1792, shared=640) == [1920]
    assert stops(2100, 128, start=1920) == []


def test_a_prompt_of_few_blocks_is_computed_at_once():
    assert stops(100, 128) == []
    assert stops(1000, 784) == []


def test_a_request_that_was_not_begun_or_has_ended_keeps_what_vllm_has_set():
    request = SimpleNamespace(request_id="r", num_prompt_tokens=2100, shared_prefix_boundary=7)
    chosen = states(128)
    chosen.go_on(request, 0)
    assert request.shared_prefix_boundary == 7
    chosen.begin(request, 0, 0)
    chosen.finished("r")
    request.shared_prefix_boundary = 7
    chosen.go_on(request, 0)
    assert request.shared_prefix_boundary == 7


CHUNK, BLOCK = 256, 64
WHOLE = CacheGroup(number=0, layers=("0",), block_tokens=BLOCK)
WINDOW = CacheGroup(number=1, layers=("1",), block_tokens=BLOCK, window=512)


def kept(tokens: int, shared: int = 0, group: int = 1) -> list[int]:
    """Chunks of a prompt that are stored of a group, when two steps complete it."""
    request = SimpleNamespace(request_id="r", num_prompt_tokens=tokens, shared_prefix_boundary=0)
    ends = HitEnds([WHOLE, WINDOW], CHUNK)
    assert ends
    ends.begin(request, 0, shared)
    assert request.shared_prefix_boundary == 0  # no states
    chunks, middle = [], tokens // 2 // CHUNK * CHUNK
    for start, end in ((0, middle), (middle, tokens // CHUNK * CHUNK)):
        blocks = list(range(1 + start // BLOCK, 1 + end // BLOCK))
        store = ends.kept(TokenRange("r", None, start, end, blocks=[blocks, blocks]))
        assert store.blocks[0] == blocks
        ids = store.blocks[group]
        for chunk in range((end - start) // CHUNK):
            of_chunk = ids[chunk * CHUNK // BLOCK :][: CHUNK // BLOCK]
            assert bool(of_chunk[0]) == bool(of_chunk[-1])
            if of_chunk[0]:
                chunks.append(start // CHUNK + chunk)
    return chunks


def test_of_a_short_prompt_all_windows_are_kept():
    assert kept(6000) == list(range(23))


def test_of_a_long_prompt_the_windows_are_kept_where_a_later_one_may_part():
    """In the first 8,192 tokens all, then two chunks before 16,384, and at the end."""
    assert kept(20_000) == [*range(32), 62, 63, 75, 76, 77]
    assert kept(20_000, shared=40 * CHUNK) == [*range(32), 38, 39, 62, 63, 75, 76, 77]
    assert kept(20_000, group=0) == list(range(78))


def test_a_request_that_was_never_looked_up_stores_all():
    store = TokenRange("other", None, 0, CHUNK, blocks=[[1, 2, 3, 4]] * 2)
    assert HitEnds([WHOLE, WINDOW], CHUNK).kept(store) is store


def test_a_model_of_whole_attention_has_no_ends():
    assert HitEnds.of([WHOLE], CHUNK) is None
