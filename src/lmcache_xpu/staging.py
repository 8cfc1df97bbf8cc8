"""Chunks between the paged view and host memory, by way of the device where the two differ.

Two streams and two buffers: while one chunk is copied over the link, the next one is gathered
(or the last one scattered). The link is the bottleneck by far, so two of each keep it busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_xpu.devices import Event, SideStream, has_triton
from lmcache_xpu.paged_view import PagedView
from lmcache_xpu.slots import Rows, rows_to
from lmcache_xpu.transfer import TorchTransfer, Transfer

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a request.

    Args:
        rows: which of its rows go where in the paged view; on the host.
        host: `[planes, layers, rows, row size]`, contiguous, as wide as the view's dtype.
    """

    rows: Rows
    host: torch.Tensor


class Stager:
    """Stores and loads chunks of one paged view.

    Device memory: `BUFFERS` times the largest chunk so far, kept; none where host memory is
    on the view's device.
    """

    def __init__(self, view: PagedView) -> None:
        self.transfer = transfer_of(view)
        self._device = view.device
        self._kernels = SideStream(view.device)
        self._copies = SideStream(view.device)
        self._buffers = [Buffer(view.device) for _ in range(BUFFERS)]

    def store(self, chunks: Sequence[Chunk]) -> None:
        """Copy from the view into host memory, behind what the engine has enqueued.

        Host memory is complete when this returns: LMCache publishes it at once.
        """
        self._kernels.after_engine()
        with self._kernels.current():
            rows = rows_to([chunk.rows for chunk in chunks], self._device)
        for turn, (chunk, there) in enumerate(zip(chunks, rows, strict=True)):
            if chunk.host.device == self._device:
                with self._kernels.current():
                    self.transfer.gather(there, chunk.host)
                continue
            buffer = self._buffers[turn % BUFFERS]
            with self._kernels.current():
                staged = buffer.take(chunk.host)
                if there.host is not None:  # rows that stay must survive the copy back
                    staged.copy_(chunk.host, non_blocking=True)
                self.transfer.gather(there, staged)
                buffer.filled.record()
            with self._copies.current():
                buffer.filled.wait()
                chunk.host.copy_(staged, non_blocking=True)
                buffer.free.record()
        self._copies.synchronize()
        self._kernels.synchronize()

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Copy from host memory into the view, behind what the engine has enqueued.

        What the engine enqueues next runs after the copies. Waits for them too: LMCache may
        reuse host memory as soon as a load returns.
        """
        self._kernels.after_engine()
        with self._kernels.current():
            rows = rows_to([chunk.rows for chunk in chunks], self._device)
        for turn, (chunk, there) in enumerate(zip(chunks, rows, strict=True)):
            if chunk.host.device == self._device:
                with self._kernels.current():
                    self.transfer.scatter(there, chunk.host)
                continue
            buffer = self._buffers[turn % BUFFERS]
            with self._copies.current():
                staged = buffer.take(chunk.host)
                staged.copy_(chunk.host, non_blocking=True)
                buffer.filled.record()
            with self._kernels.current():
                buffer.filled.wait()
                self.transfer.scatter(there, staged)
                buffer.free.record()
        self._kernels.before_engine()
        self._kernels.synchronize()


class Buffer:
    """Device memory for one chunk at a time.

    `filled` and `free` order the two streams that use it in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self.filled = Event(device)
        self.free = Event(device)
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, host: torch.Tensor) -> torch.Tensor:
        """Memory like `host`'s, once its last user is done (the current stream waits)."""
        if self._memory.numel() < host.nbytes:
            # Its last user may still be at work in another stream than the one that frees it.
            self.free.synchronize()
            self._memory = torch.empty(host.nbytes, dtype=torch.uint8, device=self._device)
        self.free.wait()
        return self._memory[: host.nbytes].view(host.dtype).view(host.shape)


def transfer_of(view: PagedView) -> Transfer:
    """The fastest transfer for a view's device."""
    if has_triton(view.device):
        from lmcache_xpu.triton_transfer import TritonTransfer

        return TritonTransfer.of(view)
    return TorchTransfer.of(view)
