"""Gather and scatter between the paged view and contiguous memory, in plain torch operations.

They move integers as wide as alignment allows, whatever the layout and the dtype. Only
`Float8Transfer` looks at elements: it converts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_xpu.transfer.paged_view import PagedView, bytes_at
from lmcache_xpu.transfer.slots import Rows

FLOAT8, MOST = torch.float8_e4m3fn, 448.0  # a larger number would become NaN
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class TorchTransfer:
    """Moves rows of one paged view.

    Rows are addressed in *units*: the longest run of bytes such that every row of the view starts
    at a multiple of it. So each layer and plane is a flat list of units, which are indexed.
    """

    windows: tuple[tuple[torch.Tensor, ...], ...]  # [layer][plane], each [units, unit] integers
    within: torch.Tensor  # [units of a row] int64: their places relative to the row's first
    rows: int  # rows per block
    block_step: int  # units from one block to the next
    row_step: int  # units from one row to the next

    @classmethod
    def of(cls, view: PagedView) -> TorchTransfer:
        """Prepare the transfer of a view; it holds no memory but an index per row."""
        size, (blocks, rows, heads, dim) = view.dtype.itemsize, view.shape
        block, row, head, _ = (step * size for step in view.strides)
        run = dim * size
        if heads == 1 or head == run:  # the heads of a row lie side by side
            run, heads, head = heads * run, 1, 0
        unit = math.gcd(run, block, row, head)
        within = (torch.arange(heads)[:, None] * head + torch.arange(0, run, unit)).flatten()
        reach = (blocks - 1) * block + (rows - 1) * row + (heads - 1) * head + run
        planes = (plane for layer in view.tensors for plane in layer)
        word = INTEGERS[math.gcd(8, unit, *(plane.storage_offset() * size for plane in planes))]

        def window(plane: torch.Tensor) -> torch.Tensor:
            start = int(plane.storage_offset()) * size
            return bytes_at(plane, start, reach // unit, unit, unit).view(word)

        with torch.inference_mode(False):  # what is kept may be written from either mode
            windows = tuple(tuple(map(window, layer)) for layer in view.tensors)
        return cls(windows, (within // unit).to(view.device), rows, block // unit, row // unit)

    def gather(self, rows: Rows, out: torch.Tensor, first_layer: int = 0) -> None:
        """Copy mapped rows of the view into `out`; the others of `out` stay as they are.

        Args:
            rows: which rows, on the view's device.
            out: `[chunks, planes, layers, rows, row]` on the view's device, rows as bytes or as
                elements of any dtype; the last stride is 1. Its layers begin with the view's
                `first_layer`. Row r of the rows is row r % R of chunk r // R.

        Runs on the current stream, without waiting.
        """
        for window, chunk, units in self._pairs(rows, out, first_layer):
            if rows.host is None and chunk.is_contiguous():
                torch.index_select(window, 0, units, out=chunk.view(-1, window.shape[1]))
                continue
            values = window.index_select(0, units)
            if (at := rows.host) is None:
                chunk.copy_(values.view(chunk.shape))
            else:
                chunk[at // chunk.shape[1], at % chunk.shape[1]] = values.view(len(at), -1)

    def scatter(self, rows: Rows, source: torch.Tensor, first_layer: int = 0) -> None:
        """Copy mapped rows of `source` into the view, not the others; the rest as for `gather`."""
        for window, chunk, units in self._pairs(rows, source, first_layer):
            if (at := rows.host) is not None:
                chunk = chunk[at // chunk.shape[1], at % chunk.shape[1]]
            window.index_copy_(0, units, chunk.reshape(-1, window.shape[1]))

    def warm_up(self) -> bool:
        """Return that no kernel reaches host memory; torch's operations are compiled."""
        return False

    def _pairs(
        self, rows: Rows, chunks: torch.Tensor, first_layer: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each plane's window, its part `[chunks, rows, words]`, and the window's units."""
        if not len(rows.engine):
            return
        block, row = rows.engine // self.rows, rows.engine % self.rows
        units = (block * self.block_step + row * self.row_step)[:, None] + self.within
        for layer in range(chunks.shape[2]):
            for plane, window in enumerate(self.windows[first_layer + layer]):
                yield window, chunks[:, plane, layer].view(window.dtype), units.flatten()


@dataclass(frozen=True, slots=True)
class Float8Transfer:
    """Moves rows of one paged view; outside of it their elements are float8, of scale 1.

    That is what vLLM's own fp8 KV cache holds of a model that brings no scales (its
    `BaseKVCacheMethod`). The elements' order does not matter. Calls are those of `TorchTransfer`,
    with rows as bytes; each takes device memory for the rows as the view has them.
    """

    transfer: Any  # `TorchTransfer` or `TritonTransfer`: moves rows as they are
    dtype: torch.dtype  # of the view's elements

    def gather(self, rows: Rows, out: torch.Tensor, first_layer: int = 0) -> None:
        """Do as `TorchTransfer.gather`; what is too large becomes the largest float8."""
        if rows.host is None:
            wide = torch.empty(out.shape, dtype=self.dtype, device=out.device)
        else:
            wide = self._widened(out)  # rows that are not mapped come back as they were
        self.transfer.gather(rows, wide.view(torch.uint8), first_layer)
        out.copy_(wide.clamp_(-MOST, MOST).to(FLOAT8).view(torch.uint8))

    def scatter(self, rows: Rows, source: torch.Tensor, first_layer: int = 0) -> None:
        """Do as `TorchTransfer.scatter`."""
        self.transfer.scatter(rows, self._widened(source).view(torch.uint8), first_layer)

    def warm_up(self) -> bool:
        """Compile what moves rows; return that no kernel reaches host memory: all is converted."""
        self.transfer.warm_up()
        return False

    def _widened(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(FLOAT8).to(self.dtype, memory_format=torch.contiguous_format)
