"""Chunks between the paged view and host memory, by way of the device where the two differ.

Two streams and two buffers: while one piece is copied over the link, the next one is gathered
(or the last one scattered). The link is the bottleneck by far, so two of each keep it busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lmcache_xpu.devices import Event, SideStream, has_triton, is_host
from lmcache_xpu.paged_view import PagedView
from lmcache_xpu.slots import RequestRows, Rows, request_rows
from lmcache_xpu.transfer import DirectTransfer, TorchTransfer, Transfer

BUFFERS = 2
BUFFER_BYTES = 32 * 2**20  # of one buffer, unless a single chunk is larger

# Pieces of host memory below this size are moved by a kernel that addresses them, not by the copy
# engine, which needs microseconds for each. Measured on an H200 whose link gives 55 GB/s: 288 KiB
# pieces 33 by the engine and 43 by the kernel, 1 MiB pieces 45 and 49. But compute beside a load
# takes 1.4 times as long with the kernel and 1.08 with the engine, so the kernel is for the small.
DIRECT_BYTES = 512 * 2**10


@dataclass(frozen=True, slots=True)
class HostFormat:
    """How a chunk lies in host memory: `[planes, layers, rows, row size]`, or with rows first.

    Args:
        layers: in one piece of host memory.
        planes: those of the view.
        rows_first: `[rows, planes, row size]` of one layer, so that chunks can be joined.
    """

    layers: int
    planes: int
    rows_first: bool = False

    def chunk(self, memory: torch.Tensor, rows: int, row_size: int) -> torch.Tensor:
        """Contiguous memory as `[planes, layers, rows, row size]`, without a copy."""
        if self.rows_first:
            return memory.view(rows, self.planes, row_size).permute(1, 0, 2).unsqueeze(1)
        return memory.view(self.planes, self.layers, rows, row_size)


class Plan:
    """Where the chunks of a request go, once for all of its layers.

    Args:
        form: how a chunk lies in host memory.
        rows: of the chunks.
        pieces: first chunk, and the one after the last, of what is staged at once.
    """

    def __init__(
        self, form: HostFormat, rows: RequestRows, pieces: Sequence[tuple[int, int]]
    ) -> None:
        self.form = form
        self.pieces = pieces
        self._rows = rows
        self._made: dict[tuple[int, int], Rows] = {}

    def rows(self, piece: tuple[int, int]) -> Rows:
        """Of a piece, made for its first layer: later pieces' while the first is copied."""
        if piece not in self._made:
            self._made[piece] = self._rows.chunks(*piece)
        return self._made[piece]


class Stager:
    """Stores and loads chunks of one paged view. All calls only enqueue; none waits.

    Device memory: `BUFFERS` times `BUFFER_BYTES`, or times a chunk if that is larger, from the
    first use on; none where host memory is on the view's device.
    """

    def __init__(self, view: PagedView) -> None:
        self._view = view
        self._transfer = transfer_of(view)
        self._direct = self._transfer if isinstance(self._transfer, DirectTransfer) else None
        self._kernels = SideStream(view.device)
        self._copies = SideStream(view.device)
        self._buffers = [_Buffer(view.device) for _ in range(BUFFERS)]
        self._turn = 0

    def plan(
        self,
        form: HostFormat,
        slots: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        cached: int = 0,
    ) -> Plan:
        """Where the chunks of a request go; arguments and errors as for `slots.request_rows`."""
        # Rows live and die in the stream that reads them.
        with self._kernels.current():
            rows = request_rows(self._view, slots, spans, cached)
        bytes_per_row = form.planes * form.layers * self._view.row_size * self._view.dtype.itemsize
        limit = BUFFER_BYTES // bytes_per_row if form.rows_first else 0
        if is_host(self._view.device):
            limit = 0  # nothing is staged, so nothing gains from being joined
        return Plan(form, rows, list(_pieces(rows.totals, limit)))

    def follow_engine(self) -> None:
        """Order what follows after what the engine has enqueued so far."""
        self._kernels.after_engine()

    def store(self, plan: Plan, memory: Iterable[torch.Tensor], first_layer: int = 0) -> Event:
        """From the view into host memory; the event is behind the last copy.

        Args:
            plan: of these chunks.
            memory: contiguous, one per chunk, in the plan's format; taken piece by piece.
            first_layer: of the view; the first one in `memory`.
        """
        for rows, parts in self._pieces(plan, memory):
            if self._moved_in_place(plan, rows, parts, first_layer, gather=True):
                continue
            buffer = self._next_buffer()
            with self._kernels.current():
                staged, slices = buffer.take(parts)
                if rows.host is not None:  # rows that stay must survive the copy back
                    _copy(slices, parts)
                self._transfer.gather(rows, self._chunk(plan, staged), first_layer)
                buffer.filled.record()
            with self._copies.current():
                buffer.filled.wait()
                _copy(parts, slices)
                buffer.free.record()
        gathered, done = Event(self._view.device), Event(self._view.device)
        with self._kernels.current():
            gathered.record()
        with self._copies.current():
            gathered.wait()
            done.record()
        return done

    def load(self, plan: Plan, memory: Iterable[torch.Tensor], first_layer: int = 0) -> Event:
        """From host memory into the view; the event is behind the last scatter.

        Host memory may be reused after the event. Arguments as for `store`.
        """
        for rows, parts in self._pieces(plan, memory):
            if self._moved_in_place(plan, rows, parts, first_layer, gather=False):
                continue
            buffer = self._next_buffer()
            with self._copies.current():
                staged, slices = buffer.take(parts)
                _copy(slices, parts)
                buffer.filled.record()
            with self._kernels.current():
                buffer.filled.wait()
                self._transfer.scatter(rows, self._chunk(plan, staged), first_layer)
                buffer.free.record()
        done = Event(self._view.device)
        with self._kernels.current():
            done.record()
        return done

    def _moved_in_place(
        self,
        plan: Plan,
        rows: Rows,
        parts: Sequence[torch.Tensor],
        first_layer: int,
        *,
        gather: bool,
    ) -> bool:
        """Move a piece without staging, if that is possible and better; whether it was."""
        near = parts[0].device == self._view.device
        direct = None if near else self._directly(parts)
        if not near and direct is None:
            return False
        form = self._chunk(plan, parts[0])
        with self._kernels.current():
            if direct is not None:
                direct.move_chunks(rows, parts, form, first_layer, gather=gather)
            elif gather:
                self._transfer.gather(rows, form, first_layer)
            else:
                self._transfer.scatter(rows, form, first_layer)
        return True

    def _directly(self, parts: Sequence[torch.Tensor]) -> DirectTransfer | None:
        """The transfer that reaches these small parts without staging, if there is one."""
        if self._direct is None or parts[0].nbytes >= DIRECT_BYTES:
            return None
        return self._direct if self._direct.reaches(parts) else None

    def _pieces(
        self, plan: Plan, memory: Iterable[torch.Tensor]
    ) -> Iterator[tuple[Rows, list[torch.Tensor]]]:
        """Rows and host memory of each piece, made while the one before is copied."""
        rest = iter(memory)
        for piece in plan.pieces:
            first, last = piece
            parts = [part.view(-1) for part in itertools.islice(rest, last - first)]
            with self._kernels.current():
                rows = plan.rows(piece)
            yield rows, parts

    def _chunk(self, plan: Plan, memory: torch.Tensor) -> torch.Tensor:
        rows = memory.numel() // (plan.form.planes * plan.form.layers * self._view.row_size)
        return plan.form.chunk(memory, rows, self._view.row_size)

    def _next_buffer(self) -> _Buffer:
        self._turn = (self._turn + 1) % BUFFERS
        return self._buffers[self._turn]


class _Buffer:
    """Device memory for one piece at a time; `filled` and `free` order the two streams."""

    def __init__(self, device: torch.device) -> None:
        self.filled = Event(device)
        self.free = Event(device)
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory for all parts, whole and in their slices, once its last user is done.

        The current stream waits for that user; a buffer that has to grow waits itself.
        """
        needed = sum(part.nbytes for part in parts)
        if self._memory.numel() < needed:
            self.free.synchronize()
            size = max(needed, min(BUFFER_BYTES, needed * 2))
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.free.wait()
        staged = self._memory[:needed].view(parts[0].dtype)
        return staged, list(torch.split(staged, [part.numel() for part in parts]))


def transfer_of(view: PagedView) -> Transfer:
    """The fastest transfer for a view's device."""
    if has_triton(view.device):
        from lmcache_xpu.triton_transfer import TritonTransfer

        return TritonTransfer.of(view)
    return TorchTransfer.of(view)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """One copy per chunk, enqueued from C++: chunks of one layer are many and small."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def _pieces(totals: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut chunks into runs of at most `limit` rows, and of at least one chunk.

    The chunks of a run have the same size, but its last may be smaller.
    """
    first, rows = 0, 0
    for number, total in enumerate(totals):
        uneven = number > first and (totals[number - 1] != totals[first] or total > totals[first])
        if uneven or (number > first and rows + total > limit):
            yield first, number
            first, rows = number, 0
        rows += total
    if totals:
        yield first, len(totals)
