"""Device memory that chunks pass through on their way to the host and back."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple, Self

import torch

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.transfer.devices import Event
from lmcache_xpu.transfer.tuning import tuning_of

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SMALLEST_STAGING_BYTES = 2 * 2**20

_ALIGNMENT = 256  # bytes, as PyTorch aligns what it allocates on devices


class Buffer(NamedTuple):
    """Bytes on the device for one piece; `filled` and `free` order the two streams."""

    memory: torch.Tensor
    start: int  # in the ring
    filled: Event
    free: Event


class StagingRing:
    """Device memory of which each piece takes as much as it has, in turn.

    Args:
        buffer_bytes: of the largest piece.
        count: of pieces of that size that fit at once. At least two, so that one is copied while
            another is gathered or scattered; 0 where nothing is staged.
        device: of the memory, which is allocated here.
    """

    def __init__(self, buffer_bytes: int, count: int, device: torch.device) -> None:
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._memory = torch.empty(count * _aligned(buffer_bytes), dtype=torch.uint8, device=device)
        self._used: deque[Buffer] = deque()  # the oldest first
        self._next = 0

    @classmethod
    def allocate(cls, staging_bytes: int | None, device: torch.device) -> Self:
        """Allocate `staging_bytes`, or what the device is tuned for.

        Where there is not enough memory, half of it is tried, and so on.

        Raises:
            SettingsError: not even the least can be allocated.
        """
        tuning = tuning_of(device.type)
        size = requested = tuning.staging_bytes if staging_bytes is None else staging_bytes
        while size >= SMALLEST_STAGING_BYTES:
            buffer_bytes = min(size // 2, tuning.buffer_bytes)
            try:
                ring = cls(buffer_bytes, size // buffer_bytes, device)
            except torch.OutOfMemoryError:
                size //= 2
                continue
            if size < requested:
                logger.warning(
                    "staging uses %.0f MiB of %s, not %.0f: there is not more free memory "
                    "(docs: troubleshooting#staging-smaller)",
                    *(size / 2**20, device, requested / 2**20),
                )
            return ring
        raise SettingsError(
            f"no {SMALLEST_STAGING_BYTES >> 20} MiB of free memory on {device} to stage copies in",
            f"{requested >> 20} MiB (staging_mib)",
            "Lower memory_fraction, so that the engine leaves some.",
        )

    def take(self, nbytes: int) -> Buffer:
        """Return the memory that was used longest ago; the current stream waits for its users.

        Args:
            nbytes: of the piece, at most `buffer_bytes`.
        """
        size = _aligned(max(1, nbytes))  # each has a place of its own
        start = self._next
        if start + size > len(self._memory):
            self._reclaim(start, len(self._memory))  # the end is left out
            start = 0
        self._next = start + size
        self._reclaim(start, self._next)
        memory = self._memory[start : start + nbytes]
        self._used.append(Buffer(memory, start, Event(self._device), Event(self._device)))
        return self._used[-1]

    def _reclaim(self, start: int, end: int) -> None:
        """Let the current stream wait for the users of a part of the ring, the oldest of all."""
        while self._used and start <= self._used[0].start < end:
            self._used.popleft().free.wait()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
