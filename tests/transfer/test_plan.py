"""The pieces of a request: everything once, nothing larger than a buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_xpu.errors import TransferError
from lmcache_xpu.transfer.plan import HostFormat, Piece, Plan, layer_groups, layers_of
from lmcache_xpu.transfer.slots import RequestRows, Slots

ROW = 4  # bytes


def plan(
    sizes: list[int], layers: int, buffer: int, *, planes: int = 2, order="planes", cuts=(0,)
) -> Plan:
    spans, at = [], 0
    for size in sizes:
        spans.append((at, at, at + size))
        at += size
    rows = RequestRows(Slots(torch.arange(at), holes=False), spans, lambda rows: rows)
    return Plan(HostFormat(layers, planes, order), rows, ROW, buffer, cuts)


def all_pieces(made: Plan) -> list[Piece]:
    return [piece for run in made.runs() for piece in made.pieces(run)]


def test_what_is_known_of_memory_is_asked_once_and_of_each_memory():
    made, asked = plan([2, 2, 2], 4, 0, cuts=(0, 1, 3)), []

    def addresses(chunks: list[torch.Tensor]) -> torch.Tensor:
        asked.append(chunks)
        return torch.tensor(len(asked))

    for number in (1, 2):
        memory = [torch.full((1,), number)] * 3
        tables = {int(made.table(run, memory, addresses)) for run in made.runs()}
        assert tables == {number}
        del memory  # its id may be the next one's
    one = all_pieces(made)[0]._replace(first=1, last=2)
    assert int(made.table(one, [torch.zeros(1)] * 3, addresses)) == 3
    assert [len(chunks) for chunks in asked] == [3, 3, 1]


sizes = st.lists(st.integers(0, 9), max_size=12)


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.integers(1, 2), st.integers(0, 700), st.data())
def test_pieces_cover_everything_once_and_fit(sizes, layers, planes, buffer, data):
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, layers), max_size=4)) - {layers})]
    if buffer and sizes and buffer < max(sizes) * planes * ROW:
        with pytest.raises(TransferError, match="raise staging_mib"):
            plan(sizes, layers, buffer, planes=planes, cuts=cuts)
        return
    made = plan(sizes, layers, buffer, planes=planes, cuts=cuts)
    assert {start for start, _ in made.cuts} >= set(cuts)
    seen = set()
    for piece in all_pieces(made):
        run, count = sizes[piece.first : piece.last], piece.last_layer - piece.first_layer
        assert (piece.first_layer, piece.last_layer) == made.cuts[piece.cut]
        assert len(set(run)) == 1  # staged as one tensor
        assert not buffer or sum(run) * count * planes * ROW <= buffer
        cells = {
            (chunk, layer)
            for chunk in range(piece.first, piece.last)
            for layer in range(piece.first_layer, piece.last_layer)
        }
        assert not seen & cells
        seen |= cells
    assert seen == {(c, y) for c in range(len(sizes)) for y in range(layers)}


def test_chunks_of_one_layer_join_even_if_the_last_is_smaller():
    pieces = all_pieces(plan([4, 4, 4, 1, 4], 1, 10**6, order="rows"))
    assert [(piece.first, piece.last) for piece in pieces] == [(0, 4), (4, 5)]


def test_layers_are_cut_where_a_chunk_is_larger_than_a_buffer():
    assert plan([8], 7, 3 * 8 * 2 * ROW).cuts == [(0, 3), (3, 6), (6, 7)]
    assert plan([8], 7, 3 * 8 * 2 * ROW, cuts=[0, 1]).cuts == [(0, 1), (1, 4), (4, 7)]


def test_neighbours_share_a_piece_and_rows_are_made_once():
    made = plan([2, 2, 2, 2], 4, 2 * 4 * 2 * 2 * ROW)
    pieces = all_pieces(made)
    assert [(piece.first, piece.last) for piece in pieces] == [(0, 2), (2, 4)]
    rows = made.rows(pieces[1])
    assert rows.engine.tolist() == [4, 5, 6, 7]
    assert made.rows(pieces[1]) is rows


def parts_of(made: Plan, piece: Piece, memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """A piece's slices, which are the same as tensors, as addresses and where they are staged."""
    slices = made.slices(piece, memory[piece.first : piece.last])
    parts = slices.tensors()
    assert len(slices) == len(parts)
    assert slices.nbytes == sum(slices.sizes)
    assert slices.sizes == [part.nbytes for part in parts]
    assert slices.addresses() == [part.data_ptr() for part in parts]
    staged = torch.empty(slices.nbytes, dtype=torch.uint8)
    places = slices.split(staged)
    assert [place.nbytes for place in places] == slices.sizes
    assert slices.staged_addresses(staged) == [place.data_ptr() for place in places]
    return parts


def flat(chunk: torch.Tensor) -> torch.Tensor:
    """A chunk's memory, with bytes behind it that are not the chunk's."""
    return torch.cat([chunk.flatten(), torch.zeros(5, dtype=torch.uint8)])


@pytest.mark.parametrize("layers", [3, 2, 1])
@pytest.mark.parametrize("buffer", [2 * 2 * 2 * ROW, 2 * 2 * ROW, 10**6])
def test_slices_with_rows_first_agree_also_of_leading_layers_alone(layers: int, buffer: int):
    made = plan([2, 2], 3, buffer, order="rows").of_layers(layers)
    for shift in (0, 100):  # other memory, as of other layers, with the same plan
        numbers = torch.arange(3 * 2 * 2 * ROW, dtype=torch.uint8).view(3, 2, 2, ROW)
        chunks = [numbers + 50 * c + shift for c in range(2)]
        memory = list(map(flat, chunks))
        seen = 0
        for piece in all_pieces(made):
            staged = made.staged(piece, torch.cat(parts_of(made, piece, memory)))
            for at, number in enumerate(range(piece.first, piece.last)):
                wanted = chunks[number][piece.first_layer : piece.last_layer].permute(2, 0, 1, 3)
                assert torch.equal(staged[at], wanted)
                assert torch.equal(made.chunk(piece, number, memory[number])[0], wanted)
                seen += wanted.shape[1]
        assert seen == 2 * layers


@pytest.mark.parametrize(("layer_mib", "layers"), [(1, 16), (0.28, 57), (20, 1), (0, 2**24)])
def test_layers_of_about_sixteen_mebibytes(layer_mib, layers):
    assert layers_of(int(layer_mib * 2**20)) == layers


@pytest.mark.parametrize(
    ("layers", "most", "groups"),
    [
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
        (8, 8, [(0, 8)]),
        (26, 8, [(0, 7), (7, 14), (14, 21), (21, 26)]),
        (61, 8, [*((8 * g, 8 * g + 8) for g in range(7)), (56, 61)]),
    ],
)
def test_groups_of_layers_are_few_and_of_one_size(layers, most, groups):
    assert layer_groups(layers, most) == groups


@pytest.mark.parametrize("order", ["planes", "layers"])
@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 1, 2]])
def test_slices_and_staged_memory_agree(cuts: list[int], order: str):
    """A slice copied to its place in a buffer is where the kernel looks for it."""
    made = plan([2, 2], 3, 10**6, cuts=cuts, order=order)
    first, second = (2, 3) if order == "planes" else (3, 2)
    numbers = torch.arange(2 * 3 * 2 * ROW, dtype=torch.uint8).view(first, second, 2, ROW)
    chunks = [numbers + 100 * c for c in range(2)]
    memory = list(map(flat, chunks))
    for piece in all_pieces(made):
        parts = parts_of(made, piece, memory)
        assert made.slice_bytes(piece) == max(part.numel() for part in parts)
        staged = made.staged(piece, torch.cat(parts))
        for number, chunk in enumerate(chunks):
            planes_first = chunk if order == "planes" else chunk.transpose(0, 1)
            wanted = planes_first[:, piece.first_layer : piece.last_layer]
            assert torch.equal(staged[number], wanted)
            assert torch.equal(made.chunk(piece, number, memory[number])[0], wanted)
