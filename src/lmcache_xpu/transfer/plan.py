"""Where the chunks of a request lie on both sides, and the pieces in which they are moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from lmcache_xpu.errors import TransferError
from lmcache_xpu.transfer.segments import Slices
from lmcache_xpu.transfer.slots import RequestRows, Rows

# A copy costs the link 4 microseconds on an H200 with PCIe 5: one of this size, a hundredth.
GROUP_BYTES = 16 * 2**20


class Piece(NamedTuple):
    """Some layers of neighbouring chunks. `last` and `last_layer` are not part of it."""

    first: int
    last: int
    cut: int  # which of the plan's cuts these layers are
    first_layer: int
    last_layer: int


Order = Literal["planes", "layers", "rows"]

# The dimensions of a chunk after the first, which counts chunks, by what comes first in them, and
# where each of planes, layers and rows is then found.
_ORDERS: dict[Order, tuple[int, int, int]] = {
    "planes": (1, 2, 3),  # planes, layers, rows: LMCache's KV_2LTD and KV_MLA_FMT
    "layers": (2, 1, 3),  # layers, planes, rows: a few layers are one run of memory
    "rows": (3, 1, 2),  # layers, rows, planes: of one layer, LMCache's KV_T2D
}


@dataclass(frozen=True, slots=True)
class HostFormat:
    """How a chunk lies in host memory.

    Args:
        layers: in one piece of host memory.
        planes: those of the view.
        order: `planes`: `[planes, layers, rows, row bytes]`; `layers`: `[layers, planes, rows, row
            bytes]`; `rows`: `[layers, rows, planes, row bytes]`.
    """

    layers: int
    planes: int
    order: Order = "planes"

    @property
    def joins(self) -> bool:
        """Whether chunks that follow each other in memory are one, whatever their sizes."""
        return self.order == "rows" and self.layers == 1

    @property
    def runs(self) -> int:
        """In how many places of a chunk neighbouring layers lie."""
        return self.planes if self.order == "planes" else 1

    def shaped(
        self, memory: torch.Tensor, chunks: int, layers: int, row_bytes: int
    ) -> torch.Tensor:
        """Bytes of some chunks as `[chunks, planes, layers, rows, row bytes]`, no copy."""
        rows = memory.numel() // (chunks * self.planes * layers * row_bytes)
        at = _ORDERS[self.order]
        sizes = dict(zip(at, (self.planes, layers, rows), strict=True))
        return memory.view(chunks, sizes[1], sizes[2], sizes[3], row_bytes).permute(0, *at, 4)


class Plan:
    """Where the chunks of a request go, once for all of its layers.

    Args:
        form: how a chunk lies in host memory.
        rows: of the chunks.
        row_bytes: of one row in one layer and plane.
        buffer_bytes: most that a piece may have; 0 for pieces of one chunk and any size.
        cuts: first layer of each group of layers that is moved at once, from 0 on; groups of which
            one chunk would not fit a buffer are cut further.
        layers: leading ones of the host memory that are moved; all of them if not given.

    Raises:
        TransferError: a single layer of a chunk does not fit.
    """

    def __init__(
        self,
        form: HostFormat,
        rows: RequestRows,
        row_bytes: int,
        buffer_bytes: int,
        cuts: Sequence[int] = (0,),
        layers: int | None = None,
    ) -> None:
        self.form = form
        self.request = rows
        self._layers = form.layers if layers is None else layers
        self._row_bytes = row_bytes
        self._plane_bytes = form.planes * row_bytes  # of a row, in one layer
        self._buffer_bytes = buffer_bytes
        starts = self._fitting(cuts)
        self.cuts = list(itertools.pairwise([*starts, self._layers]))
        self._whole = len(self.cuts) == 1 and self._layers == form.layers
        self._tables: dict[tuple[int, int, int], tuple[object, torch.Tensor | None]] = {}

    def of_layers(self, layers: int, cuts: Sequence[int] = (0,)) -> Plan:
        """The same for the leading layers alone, or with other cuts."""
        if layers == self._layers and len(cuts) == 1:
            return self
        return Plan(self.form, self.request, self._row_bytes, self._buffer_bytes, cuts, layers)

    def runs(self, cut: int | None = None) -> Iterator[Piece]:
        """All chunks in the layers of a cut, or of each, as few pieces as one kernel can move."""
        for number in range(len(self.cuts)) if cut is None else (cut,):
            for first, last in _runs(self.request.totals, same_size=not self.form.joins):
                yield Piece(first, last, number, *self.cuts[number])

    def cut_bytes(self, cut: int) -> int:
        """Size of all chunks in the layers of a cut."""
        first, last = self.cuts[cut]
        return sum(self.request.totals) * (last - first) * self._plane_bytes

    def pieces(self, run: Piece) -> Iterator[Piece]:
        """A run in as few pieces as fit the buffer."""
        layers = run.last_layer - run.first_layer
        rows = self._buffer_bytes // (layers * self._plane_bytes)
        count = max(1, rows // max(1, self.request.totals[run.first]))
        for first in range(run.first, run.last, count):
            yield run._replace(first=first, last=min(first + count, run.last))

    def rows(self, piece: Piece) -> Rows:
        """Of a piece's chunks; made once, in the current stream."""
        return self.request.chunks(piece.first, piece.last)

    def table(
        self,
        piece: Piece,
        memory: Sequence[torch.Tensor],
        make: Callable[[Sequence[torch.Tensor]], torch.Tensor | None],
    ) -> torch.Tensor | None:
        """What `make` says of a piece's chunks in this memory; asked once, for all layers."""
        key = (id(memory), piece.first, piece.last)
        if key not in self._tables:
            # The memory is kept, too: another would get its id.
            self._tables[key] = memory, make(memory[piece.first : piece.last])
        return self._tables[key][1]

    def slices(self, piece: Piece, chunks: Sequence[torch.Tensor]) -> Slices:
        """Parts of host memory, in the order in which they are staged.

        Args:
            piece: of this plan.
            chunks: of the piece, per chunk its bytes, flat; those behind its own are left alone.
        """
        if self._whole:
            numbers = range(piece.first, piece.last)
            return Slices(chunks, (0,), [self._chunk_bytes(number) for number in numbers])
        # A piece that is sliced has chunks of one size.
        run = self._chunk_bytes(piece.first) // self.form.runs
        layer = run // self.form.layers
        size = (piece.last_layer - piece.first_layer) * layer
        places = [at * run + piece.first_layer * layer for at in range(self.form.runs)]
        return Slices(chunks, places, [size] * len(chunks))

    def chunk(self, piece: Piece, number: int, memory: torch.Tensor) -> torch.Tensor:
        """A chunk's memory as `[1, planes, layers of the piece, rows, row bytes]`, no copy."""
        own = self._own(memory, number)
        whole = self.form.shaped(own, 1, self.form.layers, self._row_bytes)
        return whole[:, :, piece.first_layer : piece.last_layer]

    def staged(self, piece: Piece, memory: torch.Tensor) -> torch.Tensor:
        """A piece's slices, side by side, as `[chunks, planes, layers, rows, row bytes]`."""
        chunks = 1 if self.form.joins else piece.last - piece.first
        layers = piece.last_layer - piece.first_layer
        return self.form.shaped(memory, chunks, layers, self._row_bytes)

    def _own(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        size = self._chunk_bytes(number)
        return memory if memory.numel() == size else memory.narrow(0, 0, size)

    def _chunk_bytes(self, number: int) -> int:
        return self.request.totals[number] * self.form.layers * self._plane_bytes

    def slice_bytes(self, piece: Piece) -> int:
        """Size of the largest slice of a piece."""
        rows = max(self.request.totals[piece.first : piece.last])
        whole = rows * (piece.last_layer - piece.first_layer) * self._plane_bytes
        return whole if self._whole else whole // self.form.runs

    def _fitting(self, cuts: Sequence[int]) -> list[int]:
        largest = max(self.request.totals, default=0) * self._plane_bytes
        if not (self._buffer_bytes and largest):
            return list(cuts)
        fit = self._buffer_bytes // largest
        if not fit:
            raise TransferError(
                f"{largest} bytes of one layer of a chunk",
                f"at most {self._buffer_bytes}, the size of a staging buffer",
                "Lower chunk_tokens, or raise staging_mib.",
            )
        ends = [*cuts[1:], self._layers]
        return [
            layer for start, end in zip(cuts, ends, strict=True) for layer in range(start, end, fit)
        ]


def layers_of(layer_bytes: int, size_bytes: int = GROUP_BYTES) -> int:
    """How many layers of a chunk make about so many bytes; at least one."""
    return max(1, round(size_bytes / max(layer_bytes, 1)))


def layer_groups(layers: int, most: int) -> list[tuple[int, int]]:
    """Layers in as few groups of at most `most` as there can be; the last may be smaller."""
    count = -(-layers // most)
    size = -(-layers // max(count, 1))
    return [(first, min(first + size, layers)) for first in range(0, layers, size)]


def _runs(totals: Sequence[int], *, same_size: bool) -> Iterator[tuple[int, int]]:
    """Cut chunks into runs of the same size; without `same_size` the last may be smaller."""
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
