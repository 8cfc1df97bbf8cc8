"""Device memory that chunks pass through on their way to the host and back."""

from __future__ import annotations

import logging

import torch

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer.devices import Event

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# Of one buffer where there are less than the most of them. Nothing runs beside the first gather of
# a store and the last scatter of a load. But the engine's thread enqueues each piece: beside an
# H200, of a load of 7.5 GiB in layers, 60 ms long with buffers of 32 MiB, 24 to 35 with these.
BUFFER_BYTES = 64 * 2**20
MOST_BUFFERS = 4
STAGING_BYTES = 256 * 2**20  # of all buffers; the default
SMALLEST_STAGING_BYTES = 2 * 2**20


class Buffer:
    """Bytes on the device for one piece at a time; `filled` and `free` order the two streams."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.filled = Event(device)
        self.free = Event(device)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> torch.Tensor:
        """So much of the memory; the current stream waits for the last user."""
        self.free.wait()
        return self._memory[:nbytes]


def buffers(wanted: int, device: torch.device) -> list[Buffer]:
    """Buffers of `wanted` bytes together; half of it, and so on, where there is not enough.

    Raises:
        SettingsError: not even the least can be allocated.
    """
    size = wanted
    while size >= SMALLEST_STAGING_BYTES:
        try:
            count = min(max(2, size // BUFFER_BYTES), MOST_BUFFERS)
            found = [Buffer(size // count, device) for _ in range(count)]
        except torch.OutOfMemoryError:
            size //= 2
            continue
        if size < wanted:
            logger.warning(
                "staging uses %.0f MiB of %s, not %.0f: there is not more free memory",
                *(size / 2**20, device, wanted / 2**20),
            )
        return found
    raise SettingsError(
        f"no {SMALLEST_STAGING_BYTES >> 20} MiB of free memory on {device} to stage copies in",
        f"{wanted >> 20} MiB (staging_mib)",
        "Lower memory_fraction, so that the engine leaves some.",
    )
