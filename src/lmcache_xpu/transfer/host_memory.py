"""The memory of a request's chunks, of which everything is looked up once for all layer groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch

from lmcache_xpu.transfer.addresses import address_table


class HostMemory(list[torch.Tensor]):
    """Bytes, flat, one tensor per chunk. They stay where they are.

    Attributes:
        tables: by range of chunks, their addresses on the device, or None where kernels can't use
            them; kept by `HostKernels`.
    """

    def __init__(self, chunks: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(chunks)
        self.tables: dict[range, torch.Tensor | None] = {}

    @classmethod
    def of(cls, chunks: Sequence[torch.Tensor]) -> Self:
        """Return chunks as such memory, the same object if they are."""
        return chunks if isinstance(chunks, cls) else cls(chunks)

    @cached_property
    def addresses(self) -> torch.Tensor:
        """Of the chunks, `[chunks]` int64 on the host; see `address_table`."""
        return address_table(list(map(torch.Tensor.data_ptr, self)))

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The lowest and the highest of the addresses of at least one chunk."""
        lowest, highest = map(int, torch.aminmax(self.addresses))
        return lowest, highest

    @cached_property
    def devices(self) -> set[torch.device]:
        """Those that the chunks are on."""
        return {chunk.device for chunk in self}
