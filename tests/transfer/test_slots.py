"""Slot mappings: which rows a chunk means, and what is refused before anything moves."""

from __future__ import annotations

import pytest
import torch
from support.caches import Spec, build

from lmcache_xpu.errors import SlotError
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.slots import RequestRows, Rows, blocks_of, request_rows


@pytest.fixture
def tokens() -> PagedView:
    cache = build(Spec("LBHNC"))
    return PagedView.from_engine(cache.engine, cache.geometry, num_layers=3)


@pytest.fixture
def blocks() -> PagedView:
    cache = build(Spec("LBHNC"))
    return PagedView.from_engine(cache.engine, cache.geometry, num_layers=3, opaque_blocks=True)


def rows(view: PagedView, slots: list[int], skip: int = 0, spans=None):
    spans = spans or [(0, len(slots))]
    pieces = request_rows(view, torch.tensor(slots), spans, skip)
    return [readable(pieces.chunks(i, i + 1)) for i in range(len(spans))]


def readable(rows: Rows):
    host = None if rows.host is None else rows.host.tolist()
    return rows.engine.tolist(), host


def test_tokens(tokens: PagedView):
    assert rows(tokens, [5, 3, 23]) == [([5, 3, 23], None)]
    assert rows(tokens, [5, 3, 23], skip=1) == [([3, 23], [1, 2])]
    assert rows(tokens, [-1, 3, -1, 7]) == [([3, 7], [1, 3])]
    assert rows(tokens, [-1, 3, -1, 7], skip=2) == [([7], [3])]
    assert rows(tokens, [5, 3], skip=2) == [([], [])]


def test_chunks_of_a_request(tokens: PagedView):
    spans = [(0, 2), (3, 3), (3, 5)]  # with a gap, and an empty one
    assert rows(tokens, [5, 3, 9, 23, 1], spans=spans) == [
        ([5, 3], None),
        ([], None),
        ([23, 1], None),
    ]
    assert rows(tokens, [5, 3, 9, 23, 1], skip=4, spans=spans) == [
        ([], []),
        ([], None),
        ([1], [1]),
    ]
    assert rows(tokens, [5, -1, 9, 23, 1], spans=spans)[0] == ([5], [0])


def test_chunks_joined(tokens: PagedView):
    def joined(slots: list[int], skip: int = 0):
        pieces = request_rows(tokens, torch.tensor(slots), [(0, 2), (3, 5)], skip)
        return readable(pieces.chunks(0, 2))

    assert joined([5, 3, 9, 23, 1]) == ([5, 3, 23, 1], None)
    assert joined([5, -1, 9, 23, 1]) == ([5, 23, 1], [0, 2, 3])
    assert joined([5, 3, 9, 23, 1], skip=1) == ([3, 23, 1], [1, 2, 3])


@pytest.mark.parametrize("span", [(-1, 2), (2, 1), (4, 6)])
def test_chunks_outside_the_request_are_refused(tokens: PagedView, span: tuple[int, int]):
    with pytest.raises(SlotError, match=f"tokens {span[0]}:{span[1]} with 5 slots"):
        rows(tokens, [5, 3, 9, 23, 1], spans=[span])


def test_blocks(blocks: PagedView):
    assert rows(blocks, [8, 9, 10, 11, 0, 1, 2, 3]) == [([2, 0], None)]
    assert rows(blocks, [8, 9, 10, 11, 0, 1, 2, 3], skip=4) == [([0], [1])]
    assert rows(blocks, [-1, -1, -1, -1, 0, 1, 2, 3]) == [([0], [1])]
    # Only chunks must consist of whole blocks, not what lies between and after them.
    assert rows(blocks, [8, 9, 11, 10, 0, 1, 2, 3, 4], spans=[(4, 8)]) == [([0], None)]


@pytest.mark.parametrize(
    ("slots", "skip", "says"),
    [
        ([8, 9, 10], 0, "a chunk of tokens 0:3"),
        ([8, 9, 10, 11], 2, "2 are skipped"),
        ([8, 9, 11, 10], 0, "cut or reorder"),
        ([9, 10, 11, 12], 0, "cut or reorder"),
        ([8, 9, 10, -1], 0, "cut or reorder"),
        ([-1, 9, 10, 11], 0, "cut or reorder"),
    ],
)
def test_blocks_are_never_cut(blocks: PagedView, slots: list[int], skip: int, says: str):
    with pytest.raises(SlotError, match=says):
        rows(blocks, slots, skip)


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        (torch.tensor([24]), "slot 24; expected slots below 24"),
        (torch.tensor([1.0]), "torch.float32"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([[1]]), r"shape \[1, 1\]"),
        ([1, 2], "type list"),
    ],
)
def test_what_is_no_slot_mapping_is_refused(tokens: PagedView, mapping, says: str):
    with pytest.raises(SlotError, match=says):
        request_rows(tokens, mapping, [(0, len(mapping))])


def test_narrow_integers_are_welcome(tokens: PagedView):
    made = request_rows(tokens, torch.tensor([3], dtype=torch.int32), [(0, 1)]).chunks(0, 1)
    assert (made.engine.dtype, made.engine.tolist()) == (torch.int64, [3])


def test_blocks_of_slots():
    assert blocks_of(torch.tensor([20, 21, 22, -1, -1, 10, 11, 12]), 4) == {2, 3, 5}


def test_rows_that_the_view_does_not_have_are_refused(blocks: PagedView):
    assert RequestRows(blocks, torch.tensor([5, -1]), [(0, 0, 2)]).chunks(0, 1).host is not None
    with pytest.raises(SlotError, match="block 6; expected blocks below 6"):
        RequestRows(blocks, torch.tensor([6]), [(0, 0, 1)])
