"""Gather and scatter between the paged view and contiguous memory, in plain torch operations.

They move integers as wide as alignment allows, whatever the layout and the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.slots import Rows
from lmcache_xpu.transfer.tuning import tuning_of

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class TorchTransfer:
    """Moves rows of one paged view.

    Rows are addressed in *units*: the longest run of elements such that every row of the view
    starts at a multiple of it. So each layer and plane is a flat list of units, which are indexed.
    """

    windows: tuple[tuple[torch.Tensor, ...], ...]  # [layer][plane], each [units, unit] integers
    within: torch.Tensor  # [units of a row] int64: their places relative to the row's first
    rows: int  # rows per block
    block_step: int  # units from one block to the next
    row_step: int  # units from one row to the next
    large: bool  # a row is one unit of at least `large_row_bytes`
    wide: bool  # units can be written 16 bytes at a time

    @classmethod
    def of(cls, view: PagedView) -> TorchTransfer:
        """Prepare the transfer of a view; it holds no memory but an index per row."""
        blocks, rows, heads, dim = view.shape
        block, row, head, _ = view.strides
        merged = heads == 1 or head == dim  # the heads of a row lie side by side
        run = heads * dim if merged else dim
        steps = [(block, blocks), (row, rows), (head, 1 if merged else heads)]
        unit = math.gcd(run, *(stride for stride, extent in steps if extent > 1))
        places = torch.arange(0, run, unit)
        if not merged:
            places = (torch.arange(heads)[:, None] * head + places).flatten()
        reach = (blocks - 1) * block + (rows - 1) * row + (heads - 1) * head + dim
        row_bytes = unit * view.dtype.itemsize
        large_bytes = tuning_of(view.device.type).large_row_bytes
        large = unit == heads * dim and row_bytes >= large_bytes
        windows = tuple(
            tuple(_window(plane, reach, unit, bytewise=large) for plane in layer)
            for layer in view.tensors
        )
        flat = [window for layer in windows for window in layer]
        # Complex numbers, only moved and never computed with, are faster than int64 on CPU.
        wide = all(
            w.dtype == torch.int64 and w.shape[1] % 2 == 0 and w.storage_offset() % 2 == 0
            for w in flat
        )
        return cls(
            windows=windows,
            within=(places // unit).to(view.device),
            rows=rows,
            block_step=block // unit if blocks > 1 else 0,
            row_step=row // unit if rows > 1 else 0,
            large=large,
            wide=wide,
        )

    def gather(self, rows: Rows, out: torch.Tensor, first_layer: int = 0) -> None:
        """Copy mapped rows of the view into `out`; the others of `out` stay as they are.

        Args:
            rows: which rows, on the view's device.
            out: `[chunks, planes, layers, rows, row]` on the view's device, rows as bytes or as
                elements of any dtype; the last stride is 1. Its layers begin with the view's
                `first_layer`. Row r of the rows is row r % R of chunk r // R.

        Runs on the current stream, without waiting.
        """
        if not len(rows.engine):
            return
        index = self._units(rows)
        if self.large:
            for unit, row in self._single(rows, index, out, first_layer):
                row.copy_(unit)
            return
        for window, chunk in self._pairs(out, first_layer):
            if rows.host is None and chunk.is_contiguous():
                torch.index_select(window, 0, index, out=chunk.view(-1, window.shape[1]))
                continue
            values = window.index_select(0, index)
            if rows.host is None:
                chunk.copy_(values.view(chunk.shape))
            else:
                chunk.index_put_(_places(rows.host, chunk), values.view(len(rows.engine), -1))

    def scatter(self, rows: Rows, source: torch.Tensor, first_layer: int = 0) -> None:
        """Copy mapped rows of `source` into the view; the rest of the view stays as it is.

        Arguments and streams as for `gather`.
        """
        if not len(rows.engine):
            return
        index = self._units(rows)
        if self.large:
            for unit, row in self._single(rows, index, source, first_layer):
                unit.copy_(row)
            return
        for window, chunk in self._pairs(source, first_layer):
            by_row = chunk if rows.host is None else chunk[_places(rows.host, chunk)]
            values = by_row.reshape(-1, window.shape[1])
            if self.wide and values.storage_offset() % 2 == 0:
                window, values = window.view(torch.complex128), values.view(torch.complex128)
            window.index_put_((index,), values)

    def warm_up(self) -> None:
        """Do nothing: torch's operations are compiled."""

    def _single(
        self, rows: Rows, index: torch.Tensor, chunk: torch.Tensor, first_layer: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each unit of the view with its row of the chunk; a large row is one unit."""
        units = index.tolist()
        places = range(len(rows.engine)) if rows.host is None else rows.host.tolist()
        for window, part in self._pairs(chunk, first_layer):
            lines = [line for chunk_part in part.unbind(0) for line in chunk_part.unbind(0)]
            for unit, place in zip(units, places, strict=True):
                yield window[unit], lines[place]

    def _pairs(
        self, chunk: torch.Tensor, first_layer: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each plane's window with its part of the chunks, `[chunks, rows, words]`."""
        for layer in range(chunk.shape[2]):
            for plane, window in enumerate(self.windows[first_layer + layer]):
                yield window, chunk[:, plane, layer].view(window.dtype)

    def _units(self, rows: Rows) -> torch.Tensor:
        block = rows.engine.div(self.rows, rounding_mode="floor")
        first = block * self.block_step + (rows.engine - block * self.rows) * self.row_step
        return (first[:, None] + self.within).flatten()


def _places(rows: torch.Tensor, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of several chunks as numbers of the chunk and of the row in it."""
    size = max(1, chunks.shape[1])
    return rows.div(size, rounding_mode="floor"), rows % size


def _window(plane: torch.Tensor, reach: int, unit: int, *, bytewise: bool) -> torch.Tensor:
    """Return the plane's memory as `[units, unit]` integers, without a copy.

    They are as wide as alignment allows; bytes if torch's threads, which share elements, should
    share one unit.
    """
    size = plane.element_size()
    start = plane.storage_offset() * size
    width = 1 if bytewise else math.gcd(8, unit * size, start)
    with torch.inference_mode(False):  # what is kept may be written from either mode
        window = torch.empty(0, dtype=_INTEGERS[width], device=plane.device)
        shape = (reach // unit, unit * size // width)
        window.set_(plane.untyped_storage(), start // width, shape, (shape[1], 1))
    return window
