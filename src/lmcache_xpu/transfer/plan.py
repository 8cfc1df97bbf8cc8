"""Where the chunks of a request lie on both sides, as pieces that are moved one after another.

plan           a request
layer group    layers that are waited for at once
piece          the layers of a group in neighbouring chunks of one size
segment        a part of a chunk's memory that lies side by side
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lmcache_xpu.errors import TransferError
from lmcache_xpu.transfer.host_memory import Segments
from lmcache_xpu.transfer.slots import ChunkRows, RequestRows

Order = Literal["planes", "layers", "rows"]

# The dimensions of a chunk after the first, which counts chunks, by what comes first in them, and
# where each of planes, layers and rows is then.
_ORDERS: dict[Order, tuple[int, int, int]] = {
    "planes": (1, 2, 3),  # planes, layers, rows: LMCache's KV_2LTD and KV_MLA_FMT
    "layers": (2, 1, 3),  # layers, planes, rows: a few layers are one segment
    "rows": (3, 1, 2),  # layers, rows, planes: of one layer, LMCache's KV_T2D
}


@dataclass(frozen=True, slots=True)
class HostFormat:
    """How a chunk lies in host memory.

    Args:
        layers: in one memory object.
        planes: those of the view.
        order: `planes`: `[planes, layers, rows, row bytes]`; `layers`: `[layers, planes, rows, row
            bytes]`; `rows`: `[layers, rows, planes, row bytes]`.
    """

    layers: int
    planes: int
    order: Order = "planes"

    @property
    def contiguous(self) -> bool:
        """Whether chunks that follow each other in memory are one, whatever their sizes."""
        return self.order == "rows" and self.layers == 1

    def shaped(
        self, memory: torch.Tensor, chunks: int, layers: int, row_bytes: int
    ) -> torch.Tensor:
        """Return bytes of chunks as a view `[chunks, planes, layers, rows, row bytes]`."""
        rows = memory.numel() // (chunks * self.planes * layers * row_bytes)
        at = _ORDERS[self.order]
        sizes = dict(zip(at, (self.planes, layers, rows), strict=True))
        return memory.view(chunks, sizes[1], sizes[2], sizes[3], row_bytes).permute(0, *at, 4)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some layers of neighbouring chunks, which one kernel launch can move.

    Args:
        form: how a chunk lies in host memory.
        chunks: numbers of the chunks in the request. They are of one size; the last may be smaller
            where chunks are contiguous.
        layers: those of the host memory.
        rows: of the chunks, in the paged view and in the chunks.
        row_bytes: bytes of one row in one layer and plane.
        segments: of the chunks' memory, with these layers.
    """

    form: HostFormat
    chunks: range
    layers: range
    rows: ChunkRows
    row_bytes: int
    segments: Segments

    @property
    def nbytes(self) -> int:
        """Bytes that are moved, rows that stay included."""
        return self.segments.nbytes

    def part(self, first: int, last: int) -> Piece:
        """Return the same of this piece's chunks `first` to `last - 1`, counted from its own."""
        rows, segments = self.rows.part(first, last), self.segments.part(first, last)
        chunks = self.chunks[first:last]
        return Piece(self.form, chunks, self.layers, rows, self.row_bytes, segments)

    def parts(self, buffer_bytes: int) -> Iterator[Piece]:
        """Yield the same as few pieces that fit a buffer; one per chunk where none does."""
        count = max(1, buffer_bytes // max(1, self.segments.sizes[0] * len(self.segments.offsets)))
        for first in range(0, len(self.chunks), count):
            yield self.part(first, first + count)

    def chunk(self, memory: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Return a chunk as a view `[1, planes, layers, rows, row bytes]` of its memory.

        Args:
            memory: the chunk's bytes, flat; those behind its own are left alone.
            number: of the chunk, counted from this piece's own.
        """
        size = self.rows.total(number) * self.form.layers * self.form.planes * self.row_bytes
        own = memory if memory.numel() == size else memory.narrow(0, 0, size)
        whole = self.form.shaped(own, 1, self.form.layers, self.row_bytes)
        return whole[:, :, self.layers.start : self.layers.stop]

    def staged(self, memory: torch.Tensor) -> torch.Tensor:
        """Return all segments, side by side, as `[chunks, planes, layers, rows, row bytes]`."""
        chunks = 1 if self.form.contiguous else len(self.chunks)
        return self.form.shaped(memory, chunks, len(self.layers), self.row_bytes)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a request that are moved, and waited for, at once."""

    layers: range
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class Plan:
    """The pieces of a request, for all of its layers; iterable, layer group after layer group.

    Args:
        form: how a chunk lies in host memory.
        rows: rows of the chunks.
        row_bytes: bytes of one row in one layer and plane.
        buffer_bytes: most that one layer of a chunk may have; 0 for any size.
        starts: first layer of each layer group, from 0 on; a group of which one chunk would not fit
            a buffer becomes several.
        layers: leading ones of the host memory that are moved; all of them if not given.

    Raises:
        TransferError: a single layer of a chunk does not fit a buffer.
    """

    def __init__(
        self,
        form: HostFormat,
        rows: RequestRows,
        row_bytes: int,
        buffer_bytes: int,
        starts: Sequence[int] = (0,),
        layers: int | None = None,
    ) -> None:
        self._form = form
        self._rows = rows
        self._row_bytes = row_bytes
        self._buffer_bytes = buffer_bytes
        self._layers = form.layers if layers is None else layers
        self._starts = tuple(starts)
        bounds = itertools.pairwise([*self._fitting(starts), self._layers])
        chunk_row_bytes = form.layers * form.planes * row_bytes
        neighbours = [
            (
                ChunkRows(rows, first, last),
                [total * chunk_row_bytes for total in rows.totals[first:last]],
            )
            for first, last in _neighbours(rows.totals, same_size=not form.contiguous)
        ]
        self.groups = [self._group(range(*bound), neighbours) for bound in bounds]

    def __iter__(self) -> Iterator[Piece]:
        """Yield all pieces."""
        return (piece for group in self.groups for piece in group.pieces)

    def of_layers(self, layers: int, starts: Sequence[int] = (0,)) -> Plan:
        """Return the plan of the leading layers only, or of other layer groups."""
        if (layers, tuple(starts)) == (self._layers, self._starts):
            return self
        return Plan(self._form, self._rows, self._row_bytes, self._buffer_bytes, starts, layers)

    def _group(
        self, layers: range, neighbours: Iterable[tuple[ChunkRows, Sequence[int]]]
    ) -> LayerGroup:
        pieces = []
        for rows, chunk_bytes in neighbours:
            chunks, segments = (
                range(rows.first, rows.last),
                _segments(self._form, layers, chunk_bytes),
            )
            pieces.append(Piece(self._form, chunks, layers, rows, self._row_bytes, segments))
        return LayerGroup(layers, tuple(pieces))

    def _fitting(self, starts: Sequence[int]) -> list[int]:
        largest = max(self._rows.totals, default=0) * self._form.planes * self._row_bytes
        if not (self._buffer_bytes and largest):
            return list(starts)
        fit = self._buffer_bytes // largest
        if not fit:
            raise TransferError(
                f"{largest} bytes of one layer of a chunk",
                f"at most {self._buffer_bytes}, the size of a staging buffer",
                "Lower chunk_tokens, or raise staging_mib.",
            )
        ends = [*starts[1:], self._layers]
        return [
            layer
            for start, end in zip(starts, ends, strict=True)
            for layer in range(start, end, fit)
        ]


def _segments(form: HostFormat, layers: range, chunk_bytes: Sequence[int]) -> Segments:
    """Return where some layers lie in chunks of so many bytes.

    Chunks are of one size unless all of their layers are meant.
    """
    if len(layers) == form.layers:
        return Segments((0,), tuple(chunk_bytes))
    places = form.planes if form.order == "planes" else 1  # where the same few layers lie
    stride = chunk_bytes[0] // places
    layer = stride // form.layers
    offsets = tuple(number * stride + layers.start * layer for number in range(places))
    return Segments(offsets, (len(layers) * layer,) * len(chunk_bytes))


def _neighbours(totals: Sequence[int], *, same_size: bool) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks of the same size; without `same_size` the last may be smaller."""
    first = 0
    for number, total in enumerate(totals):
        if number > first and (
            totals[number - 1] != totals[first]
            or total > totals[first]
            or (same_size and total != totals[first])
        ):
            yield first, number
            first = number
    if totals:
        yield first, len(totals)
