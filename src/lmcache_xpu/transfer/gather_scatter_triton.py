"""Gather and scatter as one Triton kernel: all layers and planes of a chunk in one launch.

Only what Triton's CUDA, ROCm and Intel backends all have: integer loads and stores with masks, and
pointers made from integers.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from lmcache_xpu.transfer.devices import address_table, event_at, is_host, logger
from lmcache_xpu.transfer.gather_scatter import INTEGERS
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.slots import Rows
from lmcache_xpu.transfer.tuning import TUNING

# "0" leaves out the try whether kernels reach host memory: one that goes wrong may cost the device.
# On XPU vLLM's own model runner reads it in each step (vllm/v1/worker/gpu/buffer_utils.py).
KERNELS_READ_HOST_VARIABLE = "LMCACHE_XPU_KERNELS_READ_HOST"
_WARM_ROWS = 16  # so that strides are as divisible as those of whole chunks


# Triton compiles a kernel anew for integers that 16 divides, for 1, and for pointers that are less
# aligned. What changes from call to call must not cost an engine's step half a second.
@triton.jit(
    do_not_specialize=["num_rows", "num_planes", "rows_per_chunk", "table_offset"],
    do_not_specialize_on_alignment=["plane_ptr", "row_ptr", "host_row_ptr", "table_ptr"],
)
def _paged_copy(
    plane_ptr,  # [layers * planes] addresses of the first word of each layer's plane
    row_ptr,  # [rows] rows of the paged view
    host_row_ptr,  # [rows] rows of the chunk; read only with SPARSE
    chunk_ptr,  # [chunks, planes, layers, rows, words]; with TABLE only its type counts
    table_ptr,  # [chunks] addresses of chunks, read only with TABLE
    num_rows,
    num_planes,  # of all layers of the chunk
    rows_per_block,
    block_stride,  # strides in words, of the paged view ...
    row_stride,
    head_stride,
    chunk_stride,  # ... and of the chunks; not read with TABLE
    chunk_plane_stride,
    chunk_layer_stride,
    chunk_row_stride,
    rows_per_chunk,
    table_offset,  # words from each of the table's addresses to where the chunk begins
    PLANES: tl.constexpr,
    HEAD: tl.constexpr,  # words that lie side by side: a head, or a whole row
    ROW: tl.constexpr,  # words of a row
    ROWS_TILE: tl.constexpr,
    WORDS_TILE: tl.constexpr,
    GATHER: tl.constexpr,  # view to chunk; else chunk to view
    SPARSE: tl.constexpr,
    TABLE: tl.constexpr,  # each chunk is where the table says
):
    """chunk[r // R, p, l, r % R, w] <-> view[l][p, block, row, w // H, w % H], r a host row."""
    row_tiles = (num_rows + ROWS_TILE - 1) // ROWS_TILE
    word_tiles: tl.constexpr = (ROW + WORDS_TILE - 1) // WORDS_TILE
    for tile in range(tl.program_id(0), row_tiles * word_tiles * num_planes, tl.num_programs(0)):
        lp = tile // (row_tiles * word_tiles)
        rest = tile - lp * (row_tiles * word_tiles)
        layer = (lp // PLANES).to(tl.int64)
        plane = (lp % PLANES).to(tl.int64)
        i = (rest // word_tiles).to(tl.int64) * ROWS_TILE + tl.arange(0, ROWS_TILE)
        w = (rest % word_tiles) * WORDS_TILE + tl.arange(0, WORDS_TILE)
        mask = (i < num_rows)[:, None] & (w < ROW)[None, :]

        row = tl.load(row_ptr + i, mask=i < num_rows, other=0)  # int64: may pass 2^31 words
        block = row // rows_per_block
        place = block * block_stride + (row - block * rows_per_block) * row_stride
        inside = (w // HEAD).to(tl.int64) * head_stride + w % HEAD
        base = tl.load(plane_ptr + layer * PLANES + plane).to(chunk_ptr.dtype)
        engine = base + place[:, None] + inside[None, :]

        at = tl.load(host_row_ptr + i, mask=i < num_rows, other=0) if SPARSE else i
        number = at // rows_per_chunk
        start = plane * chunk_plane_stride + layer * chunk_layer_stride
        start += (at - number * rows_per_chunk) * chunk_row_stride
        if TABLE:
            bases = tl.load(table_ptr + number, mask=i < num_rows, other=0).to(chunk_ptr.dtype)
            chunk = bases[:, None] + (start + table_offset)[:, None] + w[None, :]
        else:
            chunk = chunk_ptr + (start + number * chunk_stride)[:, None] + w[None, :]
        if GATHER:
            tl.store(chunk, tl.load(engine, mask=mask), mask=mask)
        else:
            tl.store(engine, tl.load(chunk, mask=mask), mask=mask)


@dataclass(frozen=True, slots=True)
class TritonTransfer:
    """Moves rows of one paged view; the same calls as `TorchTransfer`."""

    addresses: tuple[torch.Tensor, ...]  # by first layer, [layers * planes] int64 on the device
    word: torch.dtype
    planes: int
    rows: int  # rows per block
    strides: tuple[int, int, int]  # of block, row and head, in words
    head: int  # words that lie side by side: a head, or a whole row
    row: int  # words of a row
    tile: tuple[int, int]  # rows and words that one program moves at once

    @classmethod
    def of(cls, view: PagedView) -> TritonTransfer:
        """Prepare the transfer of a view; it holds an address per layer and plane."""
        _, rows, heads, dim = view.shape
        *strides, _ = view.strides
        head = heads * dim if heads == 1 or strides[2] == dim else dim
        size = view.dtype.itemsize
        addresses = [plane.data_ptr() for layer in view.tensors for plane in layer]
        width = math.gcd(8, head * size, *(s * size for s in strides), *addresses)
        words = [*(value * size // width for value in (*strides, head)), view.row_bytes // width]
        table = address_table(addresses).to(view.device)
        tile = min(TUNING.tile_words, triton.next_power_of_2(words[4]))
        return cls(
            addresses=tuple(table[layer * view.planes :] for layer in range(view.layers)),
            word=INTEGERS[width],
            planes=view.planes,
            rows=rows,
            strides=(words[0], words[1], words[2]),
            head=words[3],
            row=words[4],
            tile=(max(1, TUNING.tile_words // tile), tile),
        )

    def gather(self, rows: Rows, out: torch.Tensor, first_layer: int = 0, **host: Any) -> None:
        """Do as `TorchTransfer.gather`, in one launch.

        Also into pinned host memory, if that is what `host` has of it:

            table: `[chunks]` int64 on the view's device, addresses of chunks of one size, `aligned`
            offset: bytes from each of them to the chunk's first element

        `out` is the first of these chunks.
        """
        self._launch(rows, out, first_layer, gather=True, **host)

    def scatter(self, rows: Rows, source: torch.Tensor, first_layer: int = 0, **host: Any) -> None:
        """Do as `TorchTransfer.scatter`, in one launch; also from host memory, see `gather`."""
        self._launch(rows, source, first_layer, gather=False, **host)

    def aligned(self, addresses: torch.Tensor) -> bool:
        """Whether kernels can use these addresses: aligned as the view is."""
        return not bool((addresses % self.word.itemsize).any())

    def warm_up(self) -> bool:
        """Compile what this view will need, and try whether kernels reach pinned host memory.

        For an engine that does not use its cache yet: the view's first row is moved out and in
        again. Waits for the device. Without the try, or where it fails, everything is staged.
        """
        size = _WARM_ROWS * self.row * self.word.itemsize * self.planes
        row = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.addresses[0].device)
        self._move_first_row(row, gather=True)
        reached = os.environ.get(KERNELS_READ_HOST_VARIABLE) != "0" and self._reaches_host(row)
        self._move_first_row(row, gather=False)
        return reached

    def _reaches_host(self, row: torch.Tensor) -> bool:
        # Logged before, since it is the last line if the device is lost.
        logger.info(
            "Trying whether kernels on %s reach pinned host memory (%s=0 leaves it out)",
            row.device,
            KERNELS_READ_HOST_VARIABLE,
        )
        try:
            wrong = self._wrong_on_host(row)
        except Exception as error:  # whatever a driver or a compiler raises
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            logger.warning(
                "Kernels on %s don't reach pinned host memory: %s "
                "(docs: troubleshooting#host-not-reached)",
                row.device,
                wrong,
            )
        return not wrong

    def _wrong_on_host(self, row: torch.Tensor) -> str | None:
        """Return what is wrong with host memory that a kernel writes and reads; None if nothing.

        Leaves other bytes in the view's first row; `row` holds its own.
        """
        host = torch.empty(row.shape, dtype=torch.uint8, pin_memory=not is_host(row.device))
        table = address_table([host.data_ptr()]).to(row.device)
        host.fill_(0xFF)
        self._move_first_row(host, table, gather=True)
        expected = row.cpu()  # waits for both
        if not torch.equal(host, expected):
            return "other bytes arrived"
        host.copy_(expected.bitwise_not())  # bytes that the view does not hold yet
        back = torch.zeros_like(row)
        self._move_first_row(host, table, gather=False)
        event_at(row.device).synchronize()  # the host's memory is given up here
        self._move_first_row(back, gather=True)
        return None if torch.equal(back.cpu(), host) else "other bytes were read"

    def _move_first_row(
        self, row: torch.Tensor, table: torch.Tensor | None = None, *, gather: bool
    ) -> None:
        """Move the first row of the view's first layer, in every form that `_launch` compiles.

        `row` is on the device, or in pinned host memory, whose address `table` then has.
        """
        at = torch.zeros(1, dtype=torch.int64, device=self.addresses[0].device)
        words = row.view(self.word)
        for form in (  # planes first, and rows first
            words.view(1, self.planes, 1, _WARM_ROWS, self.row),
            words.view(1, 1, _WARM_ROWS, self.planes, self.row).permute(0, 3, 1, 2, 4),
        ):
            for rows in (Rows(at, None), Rows(at, at)):
                self._launch(rows, form, 0, gather=gather, table=table)

    def _launch(
        self,
        rows: Rows,
        chunk: torch.Tensor,
        first_layer: int,
        *,
        gather: bool,
        table: torch.Tensor | None = None,
        offset: int = 0,
    ) -> None:
        count = len(rows.engine)
        if not count:
            return
        words = chunk.view(self.word)
        addresses, (rows_tile, tile) = self.addresses[first_layer], self.tile
        planes = words.shape[2] * self.planes
        tiles = -(-count // rows_tile) * -(-self.row // tile) * planes
        # Staged memory is the device's, whose speed needs the full grid.
        grid = (tiles if table is None else min(tiles, TUNING.direct_programs),)
        _paged_copy[grid](
            addresses,
            rows.engine,
            rows.engine if rows.host is None else rows.host,
            words if table is None else addresses.view(self.word),
            addresses if table is None else table,
            count,
            planes,
            self.rows,
            *self.strides,
            *words.stride()[:4],
            words.shape[3],
            offset // self.word.itemsize,
            PLANES=self.planes,
            HEAD=self.head,
            ROW=self.row,
            ROWS_TILE=rows_tile,
            WORDS_TILE=tile,
            GATHER=gather,
            SPARSE=rows.host is not None,
            TABLE=table is not None,
        )
