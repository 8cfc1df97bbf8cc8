"""The memory of LMCache's objects as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.errors import HostMemoryError
from lmcache_xpu.transfer.devices import is_host


class ChunkBytes(Sequence[torch.Tensor]):
    """The bytes of LMCache's memory objects, flat; looked at one by one, when they are needed.

    LMCache may give an object more bytes than its shape needs.

    Args:
        memory_objs: one per chunk.
        sizes: bytes that each of them needs.
        device: of the engine.
    """

    def __init__(
        self, memory_objs: Sequence[MemoryObj], sizes: Sequence[int], device: torch.device
    ) -> None:
        self._objs = memory_objs
        self._sizes = sizes
        self._device = device
        self._seen: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        """Number of objects."""
        return len(self._objs)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        """Return the bytes of an object, or of several.

        Raises:
            HostMemoryError: memory that is gone or strided, too small, or elsewhere.
        """
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index not in self._seen:
            self._seen[index] = self._checked(index)
        return self._seen[index]

    def _checked(self, index: int) -> torch.Tensor:
        # Not `tensor`, which makes three views of it: hundreds of chunks wait for this.
        memory: torch.Tensor | None = self._objs[index].raw_tensor
        if memory is None or not memory.is_contiguous():
            raise HostMemoryError("memory that is gone or strided", "valid and contiguous")
        if memory.nbytes < self._sizes[index]:
            raise HostMemoryError(f"memory of {memory.nbytes} bytes", f"{self._sizes[index]}")
        if memory.dim() != 1 or memory.dtype != torch.uint8:
            memory = memory.view(-1).view(torch.uint8)
        if not (is_host(memory.device) or memory.device == self._device):
            raise HostMemoryError(f"memory on {memory.device}", f"cpu or {self._device}")
        return memory
