"""Chunks between the paged view and host memory, staged on the device where the two differ.

While one piece is copied over the link in one stream, the next one is gathered (or the last one
scattered) in another. Two pieces keep the link busy beside an idle engine, more of them while one
of the engine's kernels fills the device.

Where engine memory is host memory (CPU), gather and scatter work on host memory directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.transfer.devices import (
    Event,
    SideStream,
    StoreHandle,
    event_at,
    has_triton,
    is_host,
    kernels_need,
    upload,
)
from lmcache_xpu.transfer.gather_scatter import Float8Transfer, TorchTransfer
from lmcache_xpu.transfer.host_copies import HostCopies, StagingRing
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostFormat, HostMemory, Piece, Plan
from lmcache_xpu.transfer.slots import RequestRows
from lmcache_xpu.transfer.tuning import TUNING

if TYPE_CHECKING:  # not everywhere there is Triton
    from lmcache_xpu.transfer.gather_scatter_triton import TritonTransfer


class Stager:
    """Stores and loads chunks of one paged view, which is not in use yet when this is made.

    Calls only enqueue, and wait for nothing, as long as host memory is pinned (see `HostCopies`).
    Calls for several layer groups of the same chunks should pass the same `HostMemory`.

    Args:
        staging_bytes: device memory for staging, see `StagingRing.allocate`; none on the host.
        in_place: memory on the view's device is not staged. Off for tests.

    Raises:
        SettingsError: not even the least can be allocated.
    """

    def __init__(
        self, view: PagedView, staging_bytes: int | None = None, *, in_place: bool = True
    ) -> None:
        self.view = view
        self.device = view.device
        self._in_place = in_place
        self._transfer: Any = transfer_of(view)
        self.reaches_host: bool = self._transfer.warm_up()  # kernels move pinned host memory
        self._kernels = SideStream(self.device, urgent=True)
        self._link = SideStream(self.device, urgent=False)
        if in_place and is_host(self.device):
            self._ring = StagingRing(0, 0, self.device)
        else:
            self._ring = StagingRing.allocate(staging_bytes, self.device)
        self.buffer_bytes = self._ring.buffer_bytes
        self.row_bytes = view.row_bytes  # of one layer and plane in host memory
        self._host = HostCopies(self.device)

    def hold_float8(self, dtype: torch.dtype) -> None:
        """Have host memory hold the view's elements, of this dtype, as float8 from now on."""
        self._transfer, self.reaches_host = Float8Transfer(self._transfer, dtype), False
        self.row_bytes = self.view.row_bytes // dtype.itemsize

    def pin(self, pool: torch.Tensor) -> None:
        """Pin memory that will be copied from and to, if it is not; takes seconds for GiB."""
        if self.buffer_bytes:
            self._host.pinned(HostMemory([pool]))

    def plan(self, form: HostFormat, rows: RequestRows, starts: Sequence[int] = (0,)) -> Plan:
        """Return where the chunks of a request go; see `Plan`."""
        return Plan(form, rows, self.row_bytes, self.buffer_bytes, starts)

    def follow_engine(self) -> None:
        """Order what follows after what the engine has enqueued so far."""
        self._kernels.after_engine()

    def let_engine_copy(self) -> None:
        """Order copies that follow behind the engine's own few bytes, which would else wait."""
        self._link.after_engine()

    def needs_no_copies(self, pieces: Sequence[Piece], memory: HostMemory) -> bool:
        """Whether a load of these pieces on an idle device is for kernels only, but an upload."""
        if not self.buffer_bytes:
            return True
        small = all(piece.segment_bytes < TUNING.direct_bytes_idle for piece in pieces)
        few = sum(piece.nbytes for piece in pieces) <= TUNING.direct_launch_bytes
        if not (self.reaches_host and (small or few)):
            return False
        with self._kernels.current():
            return all(self._table(piece, memory) is not None for piece in pieces)

    def store(
        self, pieces: Sequence[Piece], memory: HostMemory, first_layer: int = 0
    ) -> StoreHandle:
        """Enqueue a store of a plan's pieces from the view into host memory.

        The view's `first_layer` is the first one in `memory`. Waits for the copies if host memory
        is not pinned, and for nothing else.
        """
        for piece in pieces:
            if self._move_whole(piece, memory, first_layer, gather=True):
                continue
            for part in piece.parts(self.buffer_bytes):
                self._store_staged(part, memory, first_layer)
        gathered = event_at(self.device, self._kernels)
        gathered.wait(self._link)
        return StoreHandle(gathered, event_at(self.device, self._link))

    def load(
        self,
        pieces: Sequence[Piece],
        memory: HostMemory,
        first_layer: int = 0,
        *,
        idle: bool = False,
    ) -> Event:
        """Enqueue a load from host memory into the view; arguments and waits as for `store`.

        With `idle` the device has nothing else to do meanwhile. At the event that is returned the
        view is complete, and host memory may be reused.
        """
        idle = idle and self.needs_no_copies(pieces, memory)
        staged = False
        for piece in pieces:
            if self._move_whole(piece, memory, first_layer, gather=False, idle=idle):
                continue
            staged = True
            for part in piece.parts(self.buffer_bytes):
                self._load_staged(part, memory, first_layer)
        done = event_at(self.device, self._kernels)
        if not staged:
            done.wait(self._link)  # what is copied next would slow what is needed first
        return done

    def fence(self) -> Event:
        """Return a point behind all that was enqueued here, also after an error."""
        event_at(self.device, self._link).wait(self._kernels)
        return event_at(self.device, self._kernels)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Wait, after an error in a store or a load, for the part of it that was enqueued.

        The caller then gives its blocks and its host memory to others.
        """
        try:
            yield
        except BaseException:
            self.fence().synchronize()
            raise

    def _store_staged(self, part: Piece, memory: HostMemory, first_layer: int) -> None:
        pinned, segments = self._host.pinned(memory), part.segments(memory)
        with self._kernels.current():
            buffer = self._ring.take(part.nbytes)
            rows = part.rows.chunks(part.chunks.start, part.chunks.stop)
            if rows.host is not None:  # rows that stay must survive the copy back
                self._host.load(buffer.memory, segments, pinned=pinned)
            layer = first_layer + part.layers.start
            self._transfer.gather(rows, part.staged(buffer.memory), layer)
            buffer.filled.record()
        with self._link.current():
            buffer.filled.wait()
            self._host.store(segments, buffer.memory, pinned=pinned)
            buffer.free.record()

    def _load_staged(self, part: Piece, memory: HostMemory, first_layer: int) -> None:
        pinned, segments = self._host.pinned(memory), part.segments(memory)
        with self._link.current():
            buffer = self._ring.take(part.nbytes)
            self._host.load(buffer.memory, segments, pinned=pinned)
            # In this stream, or they would be copied behind all pieces that are enqueued.
            rows = part.rows.chunks(part.chunks.start, part.chunks.stop)
            self._kernels.reads(rows.engine, rows.host)
            buffer.filled.record()
        with self._kernels.current():
            buffer.filled.wait()
            layer = first_layer + part.layers.start
            self._transfer.scatter(rows, part.staged(buffer.memory), layer)
            buffer.free.record()

    def _move_whole(
        self,
        piece: Piece,
        memory: HostMemory,
        first_layer: int,
        *,
        gather: bool,
        idle: bool = False,
    ) -> bool:
        """Move a piece unstaged if it can and should be; return whether it was.

        Memory on the view's device is moved chunk by chunk. Pinned memory is moved by one launch of
        a kernel that addresses it: small segments, and with `idle` any.
        """
        layer = first_layer + piece.layers.start
        move = self._transfer.gather if gather else self._transfer.scatter
        with self._kernels.current():
            if self._in_place and memory.devices == {self.device}:
                for number in piece.chunks:
                    rows = piece.rows.chunks(number, number + 1)
                    move(rows, piece.chunk(memory[number]), layer)
                return True
            if not (idle or piece.segment_bytes < TUNING.direct_bytes):
                return False
            if not self.reaches_host or (table := self._table(piece, memory)) is None:
                return False
            rows = piece.rows.chunks(piece.chunks.start, piece.chunks.stop)
            first = memory[piece.chunks.start]
            chunk = piece.chunk(first)
            move(rows, chunk, layer, table=table, offset=chunk.data_ptr() - first.data_ptr())
        return True

    def _table(self, piece: Piece, memory: HostMemory) -> torch.Tensor | None:
        """Return a piece's chunks' addresses on the device; None where kernels can't reach them."""
        if piece.chunks not in memory.tables:
            addresses = memory.addresses[piece.chunks.start : piece.chunks.stop]
            needs = kernels_need(self.device)
            reached = self._host.pinned(memory, needs) and self._transfer.aligned(addresses)
            memory.tables[piece.chunks] = upload(addresses, self.device) if reached else None
        return memory.tables[piece.chunks]


def transfer_of(view: PagedView) -> TorchTransfer | TritonTransfer:
    """Return the fastest transfer for a view's device."""
    if has_triton(view.device):
        from lmcache_xpu.transfer.gather_scatter_triton import TritonTransfer

        return TritonTransfer.of(view)
    return TorchTransfer.of(view)
