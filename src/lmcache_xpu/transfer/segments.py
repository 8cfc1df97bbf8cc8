"""Parts of host memory that are staged side by side: a descriptor list, without the memory."""

from __future__ import annotations

from array import array
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

    def part(self, first: int, last: int) -> Segments:
        """Return the segments of chunks `first` to `last - 1`."""
        return Segments(self.offsets, self.sizes[first:last])

    def copies(self, addresses: torch.Tensor) -> torch.Tensor:
        """Return `[3, segments]` int64 on the host, with a column for each segment.

        Its address, its first byte among all that lie side by side, and its bytes.

        Args:
            addresses: `[chunks]` int64, those of the chunks.
        """
        table = torch.empty(3, len(self.sizes), len(self.offsets), dtype=torch.int64)
        table[0] = addresses.unsqueeze(1) + torch.tensor(self.offsets)
        table[2] = torch.frombuffer(array("q", self.sizes), dtype=torch.int64).unsqueeze(1)
        table = table.view(3, -1)
        torch.sub(table[2].cumsum(0), table[2], out=table[1])
        return table

    def split(self, staged: torch.Tensor) -> list[torch.Tensor]:
        """Return each segment's view of `staged`, bytes that hold all of them side by side."""
        return list(staged.split_with_sizes(self.lengths()))
