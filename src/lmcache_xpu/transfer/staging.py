"""Chunks between the paged view and host memory, by way of the device where the two differ.

Two streams and a ring of buffers: while one piece is copied over the link, the next one is gathered
(or the last one scattered). The link is the bottleneck by far, so two buffers keep it busy beside
an idle engine. More of them keep it busy while one of the engine's kernels fills the device.

A piece is what is staged at once: some layers of one chunk or of several neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lmcache_xpu.transfer.addresses import address_table
from lmcache_xpu.transfer.devices import Event, SideStream, has_triton, is_host
from lmcache_xpu.transfer.gather_scatter import DirectTransfer, TorchTransfer, Transfer
from lmcache_xpu.transfer.host_copies import HostMemory
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.pinned_uploads import Uploads
from lmcache_xpu.transfer.plan import HostFormat, Piece, Plan
from lmcache_xpu.transfer.slots import Slots, request_rows
from lmcache_xpu.transfer.staging_ring import STAGING_BYTES, Buffer, buffers

# Slices of host memory below this size are moved by a kernel that addresses them, not by the copy
# engine, which needs microseconds for each. Measured on an H200 whose link gives 55 GB/s: 288 KiB
# slices 33 by the engine and 43 by the kernel, 1 MiB slices 45 and 49. But compute beside a load
# takes 1.1 to 1.4 times as long with the kernel and 1.08 with the engine, so the kernel is for the
# small.
DIRECT_BYTES = 512 * 2**10

# The same where copies are enqueued in batches: 256 KiB slices 53; smaller ones were not measured.
DIRECT_BYTES_BATCHED = 256 * 2**10

# The same where the device has nothing else to do: 2 MiB slices 52 by the engine, 51 by the kernel,
# and one launch is enqueued much earlier than hundreds of copies. That counts for more than the
# link's last GB/s up to the second size, of all slices together.
DIRECT_BYTES_ALONE = 2 * 2**20
AT_ONCE_BYTES = 256 * 2**20


class Moved(NamedTuple):
    """Points in time of a store or a load."""

    begun: Event
    done: Event  # the target is complete; the source may be reused

    def seconds(self) -> float:
        """How long it took, once it is done."""
        return self.begun.seconds_until(self.done)


class Stored(NamedTuple):
    """A store, and when the engine's blocks had been read."""

    moved: Moved
    gathered: Event


class Stager:
    """Stores and loads chunks of one paged view.

    Calls only enqueue, and wait for nothing, as long as host memory is pinned (see
    `host_memory`).

    Args:
        view: the engine's KV cache.
        staging_bytes: device memory of all buffers, allocated here. Where there is not enough,
            half of it is tried, and so on. None is used where the view is on the host.
        in_place: memory on the view's device is not staged. Off for tests, which then take an
            accelerator's way on the host.

    Raises:
        SettingsError: not even the least can be allocated.
    """

    def __init__(
        self, view: PagedView, staging_bytes: int = STAGING_BYTES, *, in_place: bool = True
    ) -> None:
        self.view = view
        self._row_bytes = view.row_size * view.dtype.itemsize
        self._in_place = in_place
        self._transfer = transfer_of(view)
        reaches_host = self._transfer.warm_up()
        direct = self._transfer if isinstance(self._transfer, DirectTransfer) else None
        self._direct = direct if reaches_host else None
        self._kernels = SideStream(view.device, urgent=True)
        self._copies = SideStream(view.device, urgent=False)
        nothing = in_place and is_host(view.device)
        self._buffers = [] if nothing else buffers(staging_bytes, view.device)
        self._turn = 0
        size = self._buffers[0].size if self._buffers else 0
        self.buffer_bytes = size
        self._host = HostMemory(view.device, size)
        self._direct_bytes = DIRECT_BYTES_BATCHED if self._host.copies_in_batches else DIRECT_BYTES
        self._upload = Uploads(view.device)

    def pin(self, pool: torch.Tensor) -> None:
        """Pin memory that copies will go from and to, if it is not; that takes seconds for GiB."""
        if self._buffers:
            self._host.pinned([pool])

    @property
    def reaches_host(self) -> bool:
        """Whether a kernel may move what lies in pinned host memory."""
        return self._direct is not None

    def plan(
        self,
        form: HostFormat,
        slots: Slots,
        spans: Sequence[tuple[int, int]],
        cached: int = 0,
        cuts: Sequence[int] = (0,),
    ) -> Plan:
        """Where the chunks of a request go; see `slots.request_rows` and `Plan`."""
        rows = request_rows(self.view, slots, spans, cached, self._upload)
        return Plan(form, rows, self._row_bytes, self.buffer_bytes, cuts)

    def follow_engine(self) -> None:
        """Order what follows after what the engine has enqueued so far."""
        self._kernels.after_engine()

    def let_engine_copy(self) -> None:
        """Order copies that follow after what the engine has enqueued so far.

        Its own few bytes for a step may else wait for ours: on an H200 they waited for all of a
        load that was enqueued beside them, 150 ms.
        """
        self._copies.after_engine()

    def needs_no_copies(self, plan: Plan, memory: Sequence[torch.Tensor], cut: int) -> bool:
        """Whether a cut that is loaded `alone` is for kernels alone: they reach its memory.

        May enqueue the upload of the memory's addresses; once, as `load` does.
        """
        if not self._buffers:
            return True
        if self._direct is None:
            return False
        small = all(plan.slice_bytes(run) < DIRECT_BYTES_ALONE for run in plan.runs(cut))
        return (small or plan.cut_bytes(cut) <= AT_ONCE_BYTES) and all(
            self._table(plan, run, memory) is not None for run in plan.runs(cut)
        )

    def store(self, plan: Plan, memory: Sequence[torch.Tensor], first_layer: int = 0) -> Stored:
        """From the view into host memory.

        Args:
            plan: of these chunks.
            memory: bytes, flat, one per chunk, in the plan's format; looked at piece by piece.
            first_layer: of the view; the first one in `memory`.

        Waits for the copies if host memory is not pinned, and for nothing else.
        """
        moved = self._begin(self._kernels)
        for run in plan.runs():
            if self._moved_in_place(
                plan, run, memory, first_layer, self._direct_bytes, gather=True
            ):
                continue
            for piece in plan.pieces(run):
                self._store_staged(plan, piece, memory, first_layer)
        self._host.flush()
        gathered = Event(self.view.device)
        gathered.record(self._kernels)
        gathered.wait(self._copies)
        moved.done.record(self._copies)
        return Stored(moved, gathered)

    def load(
        self,
        plan: Plan,
        memory: Sequence[torch.Tensor],
        first_layer: int = 0,
        cut: int | None = None,
        *,
        alone: bool = False,
    ) -> Moved:
        """From host memory into the view; waits as `store` does.

        Arguments as for `store`, and

        Args:
            cut: which of the plan's cuts to load; all of them if not given.
            alone: the device has nothing else to do meanwhile.
        """
        moved, launched = self._begin(self._copies), Event(self.view.device, timed=True)
        launched.record(self._kernels)
        direct = self._direct_bytes
        if alone and cut is not None and self.needs_no_copies(plan, memory, cut):
            direct = sys.maxsize
        staged = False
        for run in plan.runs(cut):
            if self._moved_in_place(plan, run, memory, first_layer, direct, gather=False):
                continue
            staged = True
            for piece in plan.pieces(run):
                self._load_staged(plan, piece, memory, first_layer)
        moved.done.record(self._kernels)
        if staged:
            return moved
        moved.done.wait(self._copies)  # what is copied next would slow what is needed first
        # Nothing orders the stream of copies before the kernels: its event may not be reached yet.
        return moved._replace(begun=launched)

    def fence(self) -> Moved:
        """A point behind everything that was enqueued here, whatever became of it."""
        moved, copied = self._begin(self._copies), Event(self.view.device)
        copied.record(self._copies)
        copied.wait(self._kernels)
        moved.done.record(self._kernels)
        return moved

    @contextmanager
    def whole(self) -> Iterator[None]:
        """After an error in a store or a load, wait for the part of it that is on its way.

        The caller then gives its blocks and its host memory to others.
        """
        try:
            yield
        except BaseException:
            self.fence().done.synchronize()
            self._host.flush()  # or the next store would bring the rest
            raise

    def _begin(self, stream: SideStream) -> Moved:
        moved = Moved(*(Event(self.view.device, timed=True) for _ in range(2)))
        moved.begun.record(stream)
        return moved

    def _store_staged(
        self, plan: Plan, piece: Piece, memory: Sequence[torch.Tensor], first_layer: int
    ) -> None:
        chunks = memory[piece.first : piece.last]
        slices, pinned = plan.slices(piece, chunks), self._host.pinned(chunks)
        buffer = self._next_buffer()
        with self._kernels.current():
            staged = buffer.take(slices.nbytes)
            rows = plan.rows(piece)
            if rows.host is not None:  # rows that stay must survive the copy back
                self._host.load(staged, slices, pinned=pinned)
            self._transfer.gather(rows, plan.staged(piece, staged), first_layer + piece.first_layer)
            buffer.filled.record()
        with self._copies.current():
            buffer.filled.wait()
            self._host.store(slices, staged, pinned=pinned)
            buffer.free.record()

    def _load_staged(
        self, plan: Plan, piece: Piece, memory: Sequence[torch.Tensor], first_layer: int
    ) -> None:
        chunks = memory[piece.first : piece.last]
        slices, pinned = plan.slices(piece, chunks), self._host.pinned(chunks)
        buffer = self._next_buffer()
        with self._copies.current():
            staged = buffer.take(slices.nbytes)
            self._host.load(staged, slices, pinned=pinned)
            # In this stream, or they would be copied behind all pieces that are enqueued.
            rows = plan.rows(piece)
            self._kernels.reads(rows.engine, rows.host)
            buffer.filled.record()
        with self._kernels.current():
            buffer.filled.wait()
            self._transfer.scatter(
                rows, plan.staged(piece, staged), first_layer + piece.first_layer
            )
            buffer.free.record()

    def _moved_in_place(
        self,
        plan: Plan,
        piece: Piece,
        memory: Sequence[torch.Tensor],
        first_layer: int,
        direct_bytes: int,
        *,
        gather: bool,
    ) -> bool:
        """Move a run without staging, if that is possible and better; whether it was.

        `direct_bytes` is the size of slices from which on staging is better.
        """
        first_layer += piece.first_layer
        numbers = range(piece.first, piece.last)
        if self._in_place and all(memory[n].device == self.view.device for n in numbers):
            for number in numbers:
                one = piece._replace(first=number, last=number + 1)
                chunk = plan.chunk(one, number, memory[number])
                move = self._transfer.gather if gather else self._transfer.scatter
                with self._kernels.current():
                    move(plan.rows(one), chunk, first_layer)
            return True
        if self._direct is None or plan.slice_bytes(piece) >= direct_bytes:
            return False
        table = self._table(plan, piece, memory)
        if table is None:
            return False
        with self._kernels.current():
            first = memory[piece.first]
            chunk = plan.chunk(piece, piece.first, first)
            self._direct.move_chunks(
                plan.rows(piece),
                table,
                chunk,
                first_layer,
                gather=gather,
                offset=chunk.data_ptr() - first.data_ptr(),
            )
        return True

    def _table(
        self, plan: Plan, piece: Piece, memory: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """Addresses of a piece's chunks, on the device; None if kernels can't use them."""
        with self._kernels.current():
            return plan.table(piece, memory, self._addresses)

    def _addresses(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor | None:
        assert self._direct is not None
        addresses = [chunk.data_ptr() for chunk in chunks]
        if not (self._host.kernels_reach(chunks) and self._direct.aligned(addresses)):
            return None
        return self._upload(address_table(addresses))

    def _next_buffer(self) -> Buffer:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]


def transfer_of(view: PagedView) -> Transfer:
    """The fastest transfer for a view's device."""
    if has_triton(view.device):
        from lmcache_xpu.transfer.gather_scatter_triton import TritonTransfer

        return TritonTransfer.of(view)
    return TorchTransfer.of(view)
