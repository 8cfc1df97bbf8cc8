"""Where the chunks of a request lie on both sides, as pieces that are moved one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from lmcache_xpu.errors import TransferError
from lmcache_xpu.transfer.devices import Pinning, address_table
from lmcache_xpu.transfer.slots import RequestRows

Order = Literal["planes", "layers", "rows"]

# Where planes, layers and rows are among a chunk's dimensions, by the one that comes first.
_ORDERS: dict[Order, tuple[int, int, int]] = {
    "planes": (1, 2, 3),  # [planes, layers, rows]: LMCache's KV_2LTD and KV_MLA_FMT
    "layers": (2, 1, 3),  # [layers, planes, rows]: a few layers are one segment
    "rows": (3, 1, 2),  # [layers, rows, planes]: of one layer, LMCache's KV_T2D
}


@dataclass(frozen=True, slots=True)
class HostFormat:
    """How a chunk lies in host memory; the last dimension is the row's bytes."""

    layers: int  # in one memory object
    planes: int  # those of the view
    order: Order = "planes"  # the dimension that comes first, see `_ORDERS`

    def shaped(
        self, memory: torch.Tensor, chunks: int, layers: int, row_bytes: int
    ) -> torch.Tensor:
        """Return bytes of chunks as a view `[chunks, planes, layers, rows, row bytes]`."""
        rows = memory.numel() // (chunks * self.planes * layers * row_bytes)
        at = _ORDERS[self.order]
        sizes = dict(zip(at, (self.planes, layers, rows), strict=True))
        return memory.view(chunks, sizes[1], sizes[2], sizes[3], row_bytes).permute(0, *at, 4)


class HostMemory(list[torch.Tensor]):
    """A request's chunks as flat bytes, one tensor each; looked up once for all layer groups."""

    def __init__(self, chunks: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(chunks)
        # By range of chunks, their addresses on the device, or None where kernels can't use them;
        # filled by `Stager`.
        self.tables: dict[range, torch.Tensor | None] = {}
        self.pinning: Pinning | None = None  # the least of all chunks; looked up by `HostCopies`

    @cached_property
    def addresses(self) -> torch.Tensor:
        """Addresses of the chunks, as of `address_table`."""
        return address_table(list(map(torch.Tensor.data_ptr, self)))

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices of the chunks."""
        return {chunk.device for chunk in self}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some layers of neighbouring chunks of one size, which one kernel launch can move."""

    form: HostFormat
    chunks: range  # their numbers in the request
    layers: range  # those of the host memory
    rows: RequestRows  # of the whole request
    row_bytes: int  # of one layer and plane
    offsets: tuple[int, ...]  # bytes from the beginning of each chunk to each of its segments
    segment_bytes: int  # of memory that lies side by side

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return len(self.chunks) * len(self.offsets) * self.segment_bytes

    def parts(self, buffer_bytes: int) -> Iterator[Piece]:
        """Yield as few pieces of the same that fit a buffer; one per chunk where none does."""
        count = max(1, buffer_bytes // max(1, len(self.offsets) * self.segment_bytes))
        for first in range(0, len(self.chunks), count):
            yield replace(self, chunks=self.chunks[first : first + count])

    def segments(self, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the segments as views of the request's chunks, flat bytes each."""
        return [
            memory[number].narrow(0, offset, self.segment_bytes)
            for number in self.chunks
            for offset in self.offsets
        ]

    def chunk(self, memory: torch.Tensor) -> torch.Tensor:
        """Return one of the chunks as a view `[1, planes, layers, rows, row bytes]` of `memory`.

        That is flat bytes; those behind the chunk's own are left alone.
        """
        rows = self.rows.totals[self.chunks.start]
        size = rows * self.form.layers * self.form.planes * self.row_bytes
        whole = self.form.shaped(memory[:size], 1, self.form.layers, self.row_bytes)
        return whole[:, :, self.layers.start : self.layers.stop]

    def staged(self, memory: torch.Tensor) -> torch.Tensor:
        """Return all segments side by side as `[chunks, planes, layers, rows, row bytes]`."""
        return self.form.shaped(memory, len(self.chunks), len(self.layers), self.row_bytes)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a request that are moved, and waited for, at once."""

    layers: range
    pieces: tuple[Piece, ...]
    nbytes: int  # of all pieces


class Plan(list[Piece]):
    """The pieces of a request, for all of its layers, layer group after layer group.

    Args:
        row_bytes: bytes of one row in one layer and plane.
        buffer_bytes: most that one layer of a chunk may have; 0 for any size.
        starts: first layer of each layer group, from 0 on. A group of which one chunk would not fit
            a buffer becomes several.

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
    ) -> None:
        most = max(rows.totals, default=0) * form.planes * row_bytes  # of a layer of a chunk
        if 0 < buffer_bytes < most:
            raise TransferError(
                f"{most} bytes of one layer of a chunk",
                f"at most {buffer_bytes}, the size of a staging buffer",
                "Lower chunk_tokens, or raise staging_mib.",
            )
        fitting = buffer_bytes // most if buffer_bytes and most else form.layers
        self.groups: list[LayerGroup] = []
        for start, end in itertools.pairwise([*starts, form.layers]):
            for first in range(start, end, fitting):
                layers = range(first, min(first + fitting, end))
                pieces = tuple(_pieces(form, layers, rows, row_bytes))
                nbytes = sum(piece.nbytes for piece in pieces)
                self.groups.append(LayerGroup(layers, pieces, nbytes))
        super().__init__(piece for group in self.groups for piece in group.pieces)


def _pieces(form: HostFormat, layers: range, rows: RequestRows, row_bytes: int) -> Iterator[Piece]:
    """Yield a piece of some layers for each run of chunks of one size."""
    is_whole = len(layers) == form.layers
    places = form.planes if form.order == "planes" and not is_whole else 1  # where the layers lie
    last = 0
    for total, run in itertools.groupby(rows.totals):
        first, last = last, last + len(list(run))
        layer = total * form.planes * row_bytes // places
        starts = (place * form.layers + layers.start for place in range(places))
        offsets = tuple(start * layer for start in starts)
        yield Piece(form, range(first, last), layers, rows, row_bytes, offsets, len(layers) * layer)
