"""Parts of host memory that are staged side by side: as tensors, or as addresses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


class Slices:
    """Parts of chunks, in the order in which they are staged.

    Args:
        chunks: bytes, flat.
        places: in each chunk, where its parts begin.
        sizes: by chunk, bytes of one of its parts.
    """

    def __init__(
        self, chunks: Sequence[torch.Tensor], places: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self._chunks = chunks
        self._places = places
        self.sizes = [size for size in sizes for _ in places]

    def __len__(self) -> int:
        """Number of parts."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(self.sizes)

    def tensors(self) -> list[torch.Tensor]:
        """The parts, no copies."""
        begins = ((chunk, place) for chunk in self._chunks for place in self._places)
        return [
            chunk.narrow(0, place, size)
            for (chunk, place), size in zip(begins, self.sizes, strict=True)
        ]

    def addresses(self) -> list[int]:
        """Of the parts."""
        return [chunk.data_ptr() + place for chunk in self._chunks for place in self._places]

    def split(self, staged: torch.Tensor) -> list[torch.Tensor]:
        """Where each part is in bytes that hold all of them, no copies."""
        return list(staged.split_with_sizes(self.sizes))

    def staged_addresses(self, staged: torch.Tensor) -> list[int]:
        """Of each part in bytes that hold all of them."""
        return list(itertools.accumulate(self.sizes[:-1], initial=staged.data_ptr()))
