"""The pieces of a request: everything once, nothing larger than a buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import ROW, plan

from lmcache_xpu.errors import TransferError
from lmcache_xpu.transfer.plan import Piece, Plan


def all_parts(made: Plan, buffer: int) -> list[Piece]:
    return [part for piece in made for part in piece.parts(buffer)]


sizes = st.lists(st.integers(0, 9), max_size=12)


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.integers(1, 2), st.integers(0, 700), st.data())
def test_pieces_cover_everything_once_and_fit(sizes, layers, planes, buffer, data):
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, layers), max_size=4)) - {layers})]
    if buffer and sizes and buffer < max(sizes) * planes * ROW:
        with pytest.raises(TransferError, match="raise staging_mib"):
            plan(sizes, layers, buffer, planes=planes, starts=starts)
        return
    made = plan(sizes, layers, buffer, planes=planes, starts=starts)
    assert {group.layers.start for group in made.groups} >= set(starts)
    assert list(made) == [piece for group in made.groups for piece in group.pieces]
    seen = set()
    for group in made.groups:
        size = 0
        for part in (part for piece in group.pieces for part in piece.parts(buffer)):
            tokens = [sizes[chunk] for chunk in part.chunks]
            assert part.layers == group.layers
            assert totals(part) == tokens
            assert len(set(tokens)) == 1  # staged as one tensor
            assert part.nbytes == sum(tokens) * len(part.layers) * planes * ROW
            assert not buffer or part.nbytes <= buffer
            size += part.nbytes
            cells = {(chunk, layer) for chunk in part.chunks for layer in part.layers}
            assert not seen & cells
            seen |= cells
        assert group.nbytes == size
    assert seen == {(c, y) for c in range(len(sizes)) for y in range(layers)}


def test_layers_are_cut_where_a_chunk_is_larger_than_a_buffer():
    def groups(**options) -> list[range]:
        return [group.layers for group in plan([8], 7, 3 * 8 * 2 * ROW, **options).groups]

    assert groups() == [range(3), range(3, 6), range(6, 7)]
    assert groups(starts=[0, 1]) == [range(1), range(1, 4), range(4, 7)]


def test_neighbours_share_a_piece_and_rows_are_made_once():
    buffer = 2 * 4 * 2 * 2 * ROW
    made = plan([2, 2, 2, 2], 4, buffer)
    parts = all_parts(made, buffer)
    assert [part.chunks for part in parts] == [range(2), range(2, 4)]
    rows = parts[1].rows.chunks(2, 4)
    assert rows.engine.tolist() == [4, 5, 6, 7]
    assert parts[1].rows.chunks(2, 4) is rows


def totals(piece: Piece) -> list[int]:
    return [piece.rows.totals[number] for number in piece.chunks]


def segments_of(piece: Piece, memory: list[torch.Tensor]) -> list[torch.Tensor]:
    segments = piece.segments(memory)
    assert len(segments) == len(piece.chunks) * len(piece.offsets)
    assert {part.nbytes for part in segments} == {piece.segment_bytes}
    return segments


def flat(chunk: torch.Tensor) -> torch.Tensor:
    """A chunk's memory, with bytes behind it that are not the chunk's."""
    return torch.cat([chunk.flatten(), torch.zeros(5, dtype=torch.uint8)])


@pytest.mark.parametrize("buffer", [2 * 2 * 2 * ROW, 2 * 2 * ROW, 10**6])
def test_segments_with_rows_first_agree(buffer: int):
    made = plan([2, 2], 3, buffer, order="rows")
    for shift in (0, 100):  # other memory, as of other layers, with the same plan
        numbers = torch.arange(3 * 2 * 2 * ROW, dtype=torch.uint8).view(3, 2, 2, ROW)
        chunks = [numbers + 50 * c + shift for c in range(2)]
        memory = list(map(flat, chunks))
        seen = 0
        for piece in all_parts(made, buffer):
            staged = piece.staged(torch.cat(segments_of(piece, memory)))
            for at, number in enumerate(piece.chunks):
                wanted = chunks[number][piece.layers.start : piece.layers.stop].permute(2, 0, 1, 3)
                assert torch.equal(staged[at], wanted)
                assert torch.equal(piece.chunk(memory[number])[0], wanted)
                seen += wanted.shape[1]
        assert seen == 2 * 3


@pytest.mark.parametrize("order", ["planes", "layers"])
@pytest.mark.parametrize("starts", [[0], [0, 1], [0, 1, 2]])
def test_segments_and_staged_memory_agree(starts: list[int], order: str):
    """A segment copied to its place in a buffer is where the kernel looks for it."""
    made = plan([2, 2], 3, 10**6, starts=starts, order=order)
    first, second = (2, 3) if order == "planes" else (3, 2)
    numbers = torch.arange(2 * 3 * 2 * ROW, dtype=torch.uint8).view(first, second, 2, ROW)
    chunks = [numbers + 100 * c for c in range(2)]
    memory = list(map(flat, chunks))
    for piece in made:
        staged = piece.staged(torch.cat(segments_of(piece, memory)))
        for number, chunk in enumerate(chunks):
            planes_first = chunk if order == "planes" else chunk.transpose(0, 1)
            wanted = planes_first[:, piece.layers.start : piece.layers.stop]
            assert torch.equal(staged[number], wanted)
            assert torch.equal(piece.chunk(memory[number])[0], wanted)
