"""The memory of LMCache's objects as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.devices import is_host
from lmcache_xpu.errors import HostMemoryError


class HostChunks(Sequence[torch.Tensor]):
    """The memory of LMCache's objects; looked at one by one, when it is needed.

    Args:
        memory_objs: one per chunk.
        device: of the engine.
    """

    def __init__(self, memory_objs: Sequence[MemoryObj], device: torch.device) -> None:
        self._objs = memory_objs
        self._device = device
        self._seen: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._objs)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        """Raises HostMemoryError for memory that is not contiguous, or on a third device."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index not in self._seen:
            self._seen[index] = self._checked(self._objs[index].tensor)
        return self._seen[index]

    def _checked(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None or not tensor.is_contiguous():
            raise HostMemoryError("memory that is gone or strided", "valid and contiguous")
        if not (is_host(tensor.device) or tensor.device == self._device):
            raise HostMemoryError(f"memory on {tensor.device}", f"cpu or {self._device}")
        return tensor
