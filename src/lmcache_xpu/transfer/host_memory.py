"""The memory of a request's chunks, and the parts of it that are staged side by side."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch

from lmcache_xpu.transfer.devices import address_table


class HostMemory(list[torch.Tensor]):
    """Bytes, flat, one tensor per chunk; everything is looked up once for all layer groups.

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


class Copies(NamedTuple):
    """A copy for each segment, `[segments]` int64 on the host each.

    Args:
        addresses: of the segments.
        places: first byte of each among all that lie side by side.
        sizes: bytes of each.
    """

    addresses: torch.Tensor
    places: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Descriptors of parts of chunks, in the order in which they are staged; nothing copies.

    Args:
        offsets: bytes from the beginning of each chunk to each of its segments.
        sizes: by chunk, bytes of each of its segments.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        """Number of segments."""
        return len(self.offsets) * len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return len(self.offsets) * sum(self.sizes)

    @property
    def largest(self) -> int:
        """Bytes of the largest segment."""
        return max(self.sizes)

    def tensors(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the segments as views of the chunks."""
        return [
            chunk.narrow(0, offset, size)
            for chunk, size in zip(chunks, self.sizes, strict=True)
            for offset in self.offsets
        ]

    def part(self, first: int, last: int) -> Segments:
        """Return the segments of chunks `first` to `last - 1`."""
        return Segments(self.offsets, self.sizes[first:last])

    def copies(self, addresses: torch.Tensor) -> Copies:
        """Return a copy for each segment of chunks at these addresses, `[chunks]` on the host."""
        places, sizes = _side_by_side(len(self.offsets), self.sizes)
        if len(self.offsets) == 1:
            return Copies(addresses + self.offsets[0], places, sizes)
        starts = addresses.unsqueeze(1) + torch.tensor(self.offsets)
        return Copies(starts.flatten(), places, sizes)

    def split(self, staged: torch.Tensor) -> list[torch.Tensor]:
        """Return each segment's view of `staged`, bytes that hold all of them side by side."""
        lengths = [size for size in self.sizes for _ in self.offsets]
        return list(staged.split_with_sizes(lengths))


# The groups of a load differ in where they lie in their chunks, and hardly in this.
@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # kept, and read in either mode
def _side_by_side(offsets: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where segments of these sizes, so many of each, lie side by side, and their sizes."""
    every = torch.frombuffer(array("q", sizes), dtype=torch.int64).repeat_interleave(offsets)
    return every.cumsum(0) - every, every
