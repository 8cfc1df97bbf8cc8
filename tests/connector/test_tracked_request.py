"""What is kept of a request: its tokens as keys have them, and its blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from lmcache_xpu.connector import tracked_request
from lmcache_xpu.connector.tracked_request import BlockSizes, TrackedRequest
from lmcache_xpu.versions.lmcache_server import key_tokens


def tracked(tokens, *, features=(), options=None, **sizes) -> TrackedRequest:
    request = SimpleNamespace(
        request_id="a",
        all_token_ids=tokens,
        prompt_token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        mm_features=list(features),
        sampling_params=SimpleNamespace(extra_args={"kv_transfer_params": options or {}}),
    )
    return TrackedRequest(request, "salt", BlockSizes(**{"chunk_tokens": 8, **sizes}))


def test_tokens_are_packed_once_and_anew_when_there_are_others(monkeypatch):
    packed = []
    monkeypatch.setattr(
        tracked_request,
        "key_tokens",
        lambda tokens: packed.append(1) or tuple(tokens),
    )
    tokens = list(range(20))
    made = tracked(tokens, block_tokens=[4])
    assert made.range(0, 8).tokens == tuple(range(20))
    assert made.range(8, 16).tokens == tuple(range(20))
    assert len(packed) == 1
    tokens.append(7)
    assert made.range(0, 8).tokens[-1] == 7
    tokens[-1] = 8  # as where vLLM takes a session's last turn back
    assert made.range(0, 8).tokens[-1] == 8
    assert len(packed) == 3


def test_images_are_named_in_their_places():
    from vllm.multimodal.inputs import PlaceholderRange

    def image(name: str) -> SimpleNamespace:
        return SimpleNamespace(identifier=name, mm_position=PlaceholderRange(offset=2, length=3))

    tokens = [1, 2, 9, 9, 9, 3, 4, 5]
    first, other, same = (
        tracked(list(tokens), features=[image(name)], block_tokens=[4]).range(0, 8).tokens
        for name in ("aa", "bb", "aa")
    )
    assert first == same != other != key_tokens(tokens)


@pytest.mark.parametrize(("keeps_last", "end"), [(False, 16), (True, 8)])
def test_states_have_to_come_before_the_last_token(keeps_last: bool, end: int):
    made = tracked(list(range(16)), block_tokens=[4], keeps_last=keeps_last)
    assert made.whole_chunks().end == end


def test_a_block_that_vllm_moves_leaves_nothing_in_its_old_place():
    made = tracked(list(range(64)), block_tokens=[4], moved_blocks=2)
    made.add_blocks([[10, 11, 12, 13]])
    made.add_blocks([[12, 14]])  # 12 was among the last two
    assert made.blocks == [[10, 11, 0, 13, 12, 14]]
    made.add_blocks([[10, 0]])  # 10 was not, and 0 is nobody's
    assert made.blocks == [[10, 11, 0, 13, 12, 14, 10, 0]]


def test_of_all_its_blocks_only_the_new_ones_are_added():
    made = tracked(list(range(64)), block_tokens=[4, 8])
    made.allocated([[1, 2], [3]])
    made.allocated([[1, 2, 4], [3]])
    assert made.blocks == [[1, 2, 4], [3]]


def test_each_group_has_its_own_blocks_of_a_range_and_one_without_tokens_none():
    made = tracked(list(range(64)), block_tokens=[4, 8, 0])
    made.allocated([list(range(1, 17)), list(range(21, 29)), [40]])
    made.looked_up(32, 20)
    load = made.load()
    assert made.kept == 16  # whole blocks of each group
    assert (load.start, load.end, load.kept) == (16, 32, 0)
    assert load.blocks == [[5, 6, 7, 8], [23, 24], []]


@pytest.mark.parametrize("limit", ["many", -1, 1.5, float("nan"), [], {}, None, 2**70, True])
def test_a_limit_that_is_no_number_of_tokens_is_none(limit):
    made = tracked(list(range(64)), options={"lmcache.max_offload_tokens": limit}, block_tokens=[4])
    assert made.most_stored is None or made.most_stored >= 0


BLOCK = 16


@pytest.mark.parametrize(
    ("prompt", "kept", "fills"),
    [
        ("abcdxy", 1, True),
        ("abxy", 1, True),
        ("abcdxy", 3, True),
        ("abcdxy", 0, False),  # the first block nobody loads
        ("abcdxy", 4, False),  # nor the fifth
        ("axcd", 1, False),
        ("xbcd", 1, False),
        ("ab", 2, False),  # it has all of its blocks
    ],
)
def test_a_load_fills_the_block_that_a_request_lacks_first(prompt: str, kept: int, fills: bool):
    """The load is of the second block to the fourth; blocks have a letter each."""

    def hashes(prompt: str) -> list[str]:
        return [prompt[: end + 1] for end in range(len(prompt))]

    loading = tracked(list(range(5 * BLOCK)), block_tokens=[BLOCK], hashed_tokens=BLOCK)
    loading.request.block_hashes = hashes("abcde")
    loading.looked_up(4 * BLOCK, BLOCK)
    other = SimpleNamespace(block_hashes=hashes(prompt))
    assert loading.loads_first_of(other, kept * BLOCK) is fills
