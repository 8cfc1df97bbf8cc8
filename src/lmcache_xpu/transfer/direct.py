"""Kernels that read and write pinned host memory themselves, where other transfers stage it.

Whether kernels reach host memory is tried once, when the KV cache is registered.
`LMCACHE_XPU_KERNELS_READ_HOST=0` leaves the try out. Where it fails or is left out,
`HostKernels.of` returns None, and everything is staged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from lmcache_xpu.transfer.devices import Event, address_table, is_host, upload
from lmcache_xpu.transfer.host_copies import HostCopies, Pinning
from lmcache_xpu.transfer.plan import HostMemory, Piece
from lmcache_xpu.transfer.tuning import tuning_of

if TYPE_CHECKING:  # not everywhere there is Triton
    from lmcache_xpu.transfer.gather_scatter_triton import TritonTransfer

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

KERNELS_READ_HOST_VARIABLE = "LMCACHE_XPU_KERNELS_READ_HOST"


def kernels_may_read_host(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a try may let a kernel read and write pinned host memory.

    On XPU vLLM's own model runner does it in each step (vllm/v1/worker/gpu/buffer_utils.py). A try
    that goes wrong may cost the device; the variable is for that.
    """
    return environment.get(KERNELS_READ_HOST_VARIABLE, "") != "0"


def reaches_host(transfer: TritonTransfer) -> bool:
    """Try whether a transfer's kernel moves bytes to pinned host memory and back.

    Waits for the device, and compiles the kernel for `move_chunks`. For an engine that does not use
    its cache yet; the view's first row is used, and stays as it is.
    """
    if not kernels_may_read_host():
        return False
    row = transfer.first_row()
    # Logged before, since it is the last line if the device is lost.
    logger.info(
        "Trying whether kernels on %s reach pinned host memory (%s=0 leaves it out)",
        row.device,
        KERNELS_READ_HOST_VARIABLE,
    )
    transfer.move_first_row(row, gather=True)
    try:
        wrong = _wrong_on_host(transfer, row)
    except Exception as error:  # whatever a driver or a compiler raises
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        logger.warning(
            "Kernels on %s don't reach pinned host memory: %s "
            "(docs: troubleshooting#host-not-reached)",
            row.device,
            wrong,
        )
    transfer.move_first_row(row, gather=False)
    return not wrong


def _wrong_on_host(transfer: TritonTransfer, row: torch.Tensor) -> str:
    """Return what is wrong with host memory that a kernel writes and reads; empty if nothing.

    Waits for the device, and leaves other bytes in the view's first row; `row` holds its own.
    """
    host = torch.empty(row.shape, dtype=torch.uint8, pin_memory=not is_host(row.device))
    table = address_table([host.data_ptr()]).to(row.device)
    host.fill_(0xFF)
    transfer.move_first_row(host, table, gather=True)
    expected = row.cpu()  # waits for both
    if not torch.equal(host, expected):
        return "other bytes arrived"
    host.copy_(expected.bitwise_not())  # bytes that the view does not hold yet
    back, done = torch.zeros_like(row), Event(row.device)
    transfer.move_first_row(host, table, gather=False)
    done.record()
    done.synchronize()  # the host's memory is given up here
    transfer.move_first_row(back, gather=True)
    return "" if torch.equal(back.cpu(), host) else "other bytes were read"


def kernels_need(device: torch.device) -> Pinning:
    """Return how host memory must be pinned for kernels that reach it.

    CUDA maps memory that `register_host` pins into the device's address space. XPU's call prepares
    it for copies only (SYCL's `prepare_for_device_copy`): kernels may address what was allocated
    pinned, and nothing else.
    """
    return Pinning.ALLOCATED if device.type == "xpu" else Pinning.REGISTERED


class HostKernels:
    """Moves pieces by kernels that address pinned host memory.

    Args:
        transfer: of the view.
        device: of the view.
        host: looks up which memory is pinned.
    """

    def __init__(self, transfer: TritonTransfer, device: torch.device, host: HostCopies) -> None:
        self._transfer = transfer
        self._device = device
        self._host = host

    @classmethod
    def of(cls, transfer: Any, device: torch.device, host: HostCopies) -> Self | None:
        """Return None where the transfer has no such kernel, or its kernel does not reach the host.

        Waits for the device, see `reaches_host`.
        """
        if not hasattr(transfer, "move_chunks") or not reaches_host(transfer):
            return None
        return cls(transfer, device, host)

    def move(
        self,
        piece: Piece,
        memory: HostMemory,
        first_layer: int,
        *,
        gather: bool,
        idle: bool = False,
    ) -> bool:
        """Enqueue a piece in the current stream if kernels can and should move it.

        Args:
            piece: some layers of some chunks of the request.
            memory: of all chunks of the request.
            first_layer: the view's layer that is the first one in `memory`.
            gather: from the view to the host; else from the host to the view.
            idle: `suits` holds, so that any size is for kernels.

        Returns:
            Whether it was enqueued; else it has to be staged.
        """
        if not idle and piece.segment_bytes >= tuning_of(self._device.type).direct_bytes:
            return False
        if (table := self._table(piece, memory)) is None:
            return False
        first = memory[piece.chunks.start]
        chunk = piece.chunk(first)
        self._transfer.move_chunks(
            piece.rows.chunks(piece.chunks.start, piece.chunks.stop),
            table,
            chunk,
            first_layer + piece.layers.start,
            gather=gather,
            offset=chunk.data_ptr() - first.data_ptr(),
        )
        return True

    def suits(self, pieces: Sequence[Piece], memory: HostMemory) -> bool:
        """Whether kernels can and should move all of these where the device is idle.

        May enqueue the upload of addresses in the current stream. Arguments as for `move`.
        """
        tuning = tuning_of(self._device.type)
        small = all(piece.segment_bytes < tuning.direct_bytes_idle for piece in pieces)
        launch_bytes = sum(piece.nbytes for piece in pieces)
        return (small or launch_bytes <= tuning.direct_launch_bytes) and all(
            self._table(piece, memory) is not None for piece in pieces
        )

    def _table(self, piece: Piece, memory: HostMemory) -> torch.Tensor | None:
        """Return the addresses of a piece's chunks on the device; uploaded once."""
        if piece.chunks not in memory.tables:
            addresses = memory.addresses[piece.chunks.start : piece.chunks.stop]
            needs = kernels_need(self._device)
            reached = self._host.pinned(memory, needs) and self._transfer.aligned(addresses)
            memory.tables[piece.chunks] = upload(addresses, self._device) if reached else None
        return memory.tables[piece.chunks]
