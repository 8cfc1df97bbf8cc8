"""Parts of host memory that are staged side by side: a descriptor list, without the memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segments:
    """Descriptors of parts of chunks, in the order in which they are staged.

    Methods take the chunks' bytes, flat, one tensor for each size. None of them copies.

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

    def lengths(self) -> list[int]:
        """Bytes of each segment."""
        return [size for size in self.sizes for _ in self.offsets]

    def tensors(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the segments as views of the chunks."""
        return [
            chunk.narrow(0, offset, size)
            for chunk, size in zip(chunks, self.sizes, strict=True)
            for offset in self.offsets
        ]

    def addresses(self, chunks: Sequence[torch.Tensor]) -> list[int]:
        """Return the address of each segment."""
        return [chunk.data_ptr() + offset for chunk in chunks for offset in self.offsets]

    def split(self, staged: torch.Tensor) -> list[torch.Tensor]:
        """Return each segment's view of `staged`, bytes that hold all of them side by side."""
        return list(staged.split_with_sizes(self.lengths()))

    def staged_addresses(self, staged: torch.Tensor) -> list[int]:
        """Return the address of each segment in bytes that hold all of them."""
        return list(itertools.accumulate(self.lengths()[:-1], initial=staged.data_ptr()))
