"""Which of a model's KV heads a rank holds, and in which entries of other ranks they are, too.

With tensor parallelism the KV heads are shared out evenly, in their order. Where there are fewer of
them than ranks, neighbouring ranks hold the same ones; of MLA's latent all ranks do. What several
ranks hold alike is stored by the first of them alone, under a name that is the same for all.

In a chunk of the standard connector each token has its heads side by side. So a chunk that a shard
lacks can be cut out of one of a larger shard, or joined from those of smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["Bytes", "Cut", "Shard", "ShardedMetadata", "rows", "shard_of"]

# Not of torch: where a rank was forked, the first copies of several reader threads at once can meet
# torch's own pool of threads half made ("Invalid thread pool!", torch 2.11).
Bytes = npt.NDArray[np.uint8]

SIZES = (1, 2, 4, 8)  # of tensor parallelism, whose entries are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a chunk of a shard is made of chunks of other shards.

    Args:
        count: shards that the heads of the model were shared out to.
        numbers: of those that hold this shard's heads.
        part: of the heads of a single larger one, which part is wanted.
        parts: that those are divided into; 1 where smaller ones are joined.
    """

    count: int
    numbers: range
    part: int = 0
    parts: int = 1

    def width(self, width: int) -> int:
        """Return the elements of a token in a chunk that is read, of `width` in this shard's."""
        return width * self.parts // len(self.numbers)

    def place(self, position: int, source: Bytes, target: Bytes) -> None:
        """Copy what is wanted of one of the chunks.

        Args:
            position: of the chunk's shard in `numbers`.
            source: its bytes `[rows, bytes of its heads]`.
            target: `[rows, bytes of this shard's heads]`.
        """
        if self.parts > 1:
            target[:] = np.split(source, self.parts, axis=1)[self.part]
        else:
            np.split(target, len(self.numbers), axis=1)[position][:] = source


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The heads of one rank: of `count` equal shards the one of this number.

    Args:
        count: shards that the heads are shared out to.
        number: of this one.
        copies: ranks that hold the same heads.
        stores: this rank is the first of them, which stores what they hold.
        heads: KV heads of the model; 0 where chunks can't be cut or joined.
    """

    count: int
    number: int
    copies: int = 1
    stores: bool = True
    heads: int = 0

    @classmethod
    def of_rank(cls, rank: int, ranks: int, heads: int, *, divisible: bool) -> Self:
        """Return the shard of a rank.

        Args:
            rank: its number.
            ranks: of the engine.
            heads: KV heads that all of them share out; 0 if they don't, or not evenly.
            divisible: a chunk has the heads of each token side by side.
        """
        if not heads or max(ranks, heads) % min(ranks, heads):
            return cls(count=ranks, number=rank)
        count = min(ranks, heads)
        copies = ranks // count
        return cls(
            count=count,
            number=rank // copies,
            copies=copies,
            stores=rank % copies == 0,
            heads=heads if divisible else 0,
        )

    @property
    def first_rank(self) -> int:
        """Number of the rank that stores this shard."""
        return self.number * self.copies

    def cuts(self) -> Iterator[Cut]:
        """Yield the ways to make a chunk out of other shards, the fewest bytes to read first."""
        sizes = [size for size in SIZES if self.heads and self.heads % size == 0]
        for size in sizes:
            if size > self.count and size % self.count == 0:
                each = size // self.count
                yield Cut(count=size, numbers=range(self.number * each, (self.number + 1) * each))
        for size in reversed(sizes):
            if size < self.count and self.count % size == 0:
                parts = self.count // size
                whole, part = divmod(self.number, parts)
                yield Cut(count=size, numbers=range(whole, whole + 1), part=part, parts=parts)


@dataclass
class ShardedMetadata(LMCacheMetadata):  # type: ignore[misc]  # untyped base
    """LMCache's description of an engine, and what this rank holds of its KV heads."""

    shard: Shard | None = None

    @classmethod
    def of(cls, metadata: LMCacheMetadata, shard: Shard) -> Self:
        """Return a description with a rank's shard."""
        values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
        return cls(**{**values, "shard": shard})


def shard_of(metadata: LMCacheMetadata) -> Shard:
    """Return the shard of a rank; one of its own where that was not said."""
    shard: Shard | None = getattr(metadata, "shard", None)
    return shard or Shard(count=metadata.world_size, number=metadata.worker_id)


def rows(chunk: memoryview, row_bytes: int) -> Bytes:
    """Return the bytes of a chunk as `[rows, row_bytes]`, on the same memory."""
    return np.frombuffer(chunk, np.uint8).reshape(-1, row_bytes)
