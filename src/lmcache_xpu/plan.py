"""Where the chunks of a request lie on both sides, and the pieces in which they are moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lmcache_xpu.errors import TransferError
from lmcache_xpu.slots import RequestRows, Rows


class Piece(NamedTuple):
    """Some layers of neighbouring chunks. `last` and `last_layer` are not part of it."""

    first: int
    last: int
    first_layer: int
    last_layer: int

    @property
    def layers(self) -> int:
        """How many."""
        return self.last_layer - self.first_layer


@dataclass(frozen=True, slots=True)
class HostFormat:
    """How a chunk lies in host memory: `[planes, layers, rows, row size]`, or with rows first.

    Args:
        layers: in one piece of host memory.
        planes: those of the view.
        rows_first: `[rows, planes, row size]` of one layer.
    """

    layers: int
    planes: int
    rows_first: bool = False

    def chunk(self, memory: torch.Tensor, piece: Piece, row_size: int) -> torch.Tensor:
        """A chunk's memory as `[1, planes, layers of the piece, rows, row size]`, no copy."""
        if self.rows_first:
            return self.staged(memory.view(-1), piece, row_size)
        rows = memory.numel() // (self.planes * self.layers * row_size)
        whole = memory.view(1, self.planes, self.layers, rows, row_size)
        return whole[:, :, piece.first_layer : piece.last_layer]

    def slices(self, memory: torch.Tensor, piece: Piece) -> list[torch.Tensor]:
        """What a piece has of a chunk's memory: contiguous parts."""
        if piece.layers == self.layers:
            return [memory.view(-1)]
        layers = memory.view(self.planes, self.layers, memory.numel() // self.planes // self.layers)
        return list(layers[:, piece.first_layer : piece.last_layer].unbind(0))

    def staged(self, memory: torch.Tensor, piece: Piece, row_size: int) -> torch.Tensor:
        """A piece's slices, one after another, as `[chunks, planes, layers, rows, row size]`."""
        chunks = 1 if self.rows_first else piece.last - piece.first
        rows = memory.numel() // (chunks * self.planes * piece.layers * row_size)
        if self.rows_first:  # chunks of one layer join to one
            joined = memory.view(rows, self.planes, row_size)
            return joined.permute(1, 0, 2)[None, :, None]
        return memory.view(chunks, self.planes, piece.layers, rows, row_size)


class Plan:
    """Where the chunks of a request go, once for all of its layers.

    Args:
        form: how a chunk lies in host memory.
        rows: of the chunks.
        row_bytes: of one row in one layer and plane.
        buffer_bytes: most that a piece may have; 0 for pieces of one chunk and any size.
    """

    def __init__(
        self, form: HostFormat, rows: RequestRows, row_bytes: int, buffer_bytes: int
    ) -> None:
        self.form = form
        self.request = rows
        self._plane_bytes = form.planes * row_bytes  # of a row, in one layer
        self._buffer_bytes = buffer_bytes
        self._rows: dict[tuple[int, int], Rows] = {}

    def pieces(self, first_layer: int, last_layer: int) -> Iterator[Piece]:
        """All chunks in these layers of host memory, as few pieces as fit the buffer.

        Raises:
            TransferError: a layer of a chunk does not fit; before the first piece.
        """
        totals = self.request.totals
        layers = last_layer - first_layer
        if self._buffer_bytes and totals:
            fit = self._buffer_bytes // max(1, max(totals) * self._plane_bytes)
            if not fit:
                raise TransferError(
                    f"{max(totals) * self._plane_bytes} bytes of one layer of a chunk",
                    f"at most {self._buffer_bytes}, the size of a staging buffer",
                    "Raise staging_mib, or lower chunk_tokens.",
                )
            layers = min(layers, fit)
        for start in range(first_layer, last_layer, max(1, layers)):
            end = min(last_layer, start + layers)
            limit = self._buffer_bytes // ((end - start) * self._plane_bytes)
            for first, last in _runs(totals, limit, same_size=not self.form.rows_first):
                yield Piece(first, last, start, end)

    def rows(self, piece: Piece) -> Rows:
        """Of a piece's chunks; made once, in the current stream."""
        run = piece.first, piece.last
        if run not in self._rows:
            self._rows[run] = self.request.chunks(*run)
        return self._rows[run]

    def slices(self, piece: Piece, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous parts of host memory in the order in which they are staged."""
        chunks = (memory[number] for number in range(piece.first, piece.last))
        return [part for chunk in chunks for part in self.form.slices(chunk, piece)]

    def slice_bytes(self, piece: Piece) -> int:
        """Size of the largest slice of a piece."""
        rows = max(self.request.totals[piece.first : piece.last])
        whole = rows * piece.layers * self._plane_bytes
        return whole if piece.layers == self.form.layers else whole // self.form.planes


def _runs(totals: Sequence[int], limit: int, *, same_size: bool) -> Iterator[tuple[int, int]]:
    """Cut chunks into runs of at most `limit` rows, and of at least one chunk.

    The chunks of a run have the same size; without `same_size` its last may be smaller.
    """
    first, rows = 0, 0
    for number, total in enumerate(totals):
        uneven = number > first and (
            totals[number - 1] != totals[first]
            or total > totals[first]
            or (same_size and total != totals[first])
        )
        if uneven or (number > first and rows + total > limit):
            yield first, number
            first, rows = number, 0
        rows += total
    if totals:
        yield first, len(totals)
