"""Device memory that chunks pass through on their way to the host and back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

import torch

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer.devices import Event
from lmcache_xpu.transfer.tuning import tuning_of

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SMALLEST_STAGING_BYTES = 2 * 2**20


class Buffer:
    """Bytes on the device for one piece at a time; `filled` and `free` order the two streams."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.filled = Event(device)
        self.free = Event(device)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes of the memory; the current stream waits for its last user."""
        self.free.wait()
        return self._memory[:nbytes]


class StagingRing:
    """Buffers of one size that are used in turn.

    Args:
        buffers: at least two, so that one is copied while another is gathered or scattered; none
            where nothing is staged.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._turn = 0

    @classmethod
    def allocate(cls, staging_bytes: int | None, device: torch.device) -> Self:
        """Allocate buffers of `staging_bytes` together, or of what the device is tuned for.

        Where there is not enough memory, half of it is tried, and so on.

        Raises:
            SettingsError: not even the least can be allocated.
        """
        tuning = tuning_of(device.type)
        size = requested = tuning.staging_bytes if staging_bytes is None else staging_bytes
        while size >= SMALLEST_STAGING_BYTES:
            try:
                count = min(max(2, size // tuning.buffer_bytes), tuning.most_buffers)
                buffers = [Buffer(size // count, device) for _ in range(count)]
            except torch.OutOfMemoryError:
                size //= 2
                continue
            if size < requested:
                logger.warning(
                    "staging uses %.0f MiB of %s, not %.0f: there is not more free memory "
                    "(docs: troubleshooting#staging-smaller)",
                    *(size / 2**20, device, requested / 2**20),
                )
            return cls(buffers)
        raise SettingsError(
            f"no {SMALLEST_STAGING_BYTES >> 20} MiB of free memory on {device} to stage copies in",
            f"{requested >> 20} MiB (staging_mib)",
            "Lower memory_fraction, so that the engine leaves some.",
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer; 0 if there is none."""
        return self._buffers[0].size if self._buffers else 0

    def next_buffer(self) -> Buffer:
        """Return the buffer that was used longest ago."""
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]
