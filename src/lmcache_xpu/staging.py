"""Chunks between the paged view and host memory, by way of the device where the two differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_xpu.devices import SideStream
from lmcache_xpu.paged_view import PagedView
from lmcache_xpu.slots import Rows
from lmcache_xpu.transfer import TorchTransfer


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a request.

    Args:
        rows: which of its rows go where in the paged view.
        host: `[planes, layers, rows, row size]`, contiguous, of the view's dtype.
    """

    rows: Rows
    host: torch.Tensor


class Stager:
    """Stores and loads chunks of one paged view.

    Device memory: one chunk at a time, from torch's caching allocator; none where host memory
    is on the view's device.
    """

    def __init__(self, view: PagedView) -> None:
        self._transfer = TorchTransfer.of(view)
        self._device = view.device
        self._stores = SideStream(view.device)
        self._loads = SideStream(view.device)

    def store(self, chunks: Sequence[Chunk]) -> None:
        """Copy from the view into host memory, behind what the engine has enqueued.

        Host memory is complete when this returns: LMCache publishes it at once.
        """
        with self._stores.behind_engine():
            for chunk in chunks:
                if chunk.host.device == self._device:
                    self._transfer.gather(chunk.rows, chunk.host)
                    continue
                staged = torch.empty_like(chunk.host, device=self._device)
                if chunk.rows.host is not None:  # rows that stay must survive the copy back
                    staged.copy_(chunk.host, non_blocking=True)
                self._transfer.gather(chunk.rows, staged)
                chunk.host.copy_(staged, non_blocking=True)
        self._stores.synchronize()

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Copy from host memory into the view, behind what the engine has enqueued.

        What the engine enqueues next runs after the copies. Waits for them too: LMCache may
        reuse host memory as soon as a load returns.
        """
        with self._loads.behind_engine():
            for chunk in chunks:
                staged = chunk.host.to(self._device, non_blocking=True)
                self._transfer.scatter(chunk.rows, staged)
        self._loads.before_engine()
        self._loads.synchronize()
