"""Faults of chunks that are made of other TP sizes', and of what ranks hold alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fault import Faults

from lmcache_xpu.tiers.disk import chunk_directory, neighbours
from lmcache_xpu.tiers.disk.stored_chunk import StoredChunk
from lmcache_xpu.tiers.shard import Cut, Shard

FAULTS = Faults()
fault = FAULTS.add


@fault("another part of a larger shard is cut out", "sizes", Shard, "cuts")
def _(cuts: Any) -> Any:
    def wrong(self: Shard) -> Iterator[Cut]:
        for cut in cuts(self):
            yield replace(cut, part=0)

    return wrong


@fault("smaller shards are joined in another order", "sizes", Cut, "place")
def _(place: Any) -> Any:
    def wrong(self: Cut, position: int, *rest: Any) -> None:
        place(self, len(self.numbers) - 1 - position, *rest)

    return wrong


@fault("a slice that is missing is left as it is", "sizes", StoredChunk, "read")
def _(read: Any) -> Any:
    return lambda self, buffer: read(self, buffer) or self.cut is not None


@fault("other ranks' checksums are not compared", "sizes", neighbours, "read_chunk")
def _(read: Any) -> Any:
    def wrong(*args: Any) -> str | None:
        result = read(*args)
        return None if result == "its checksum does not match" else result

    return wrong


@fault("what several ranks hold is stored by none", "sizes", Shard, "of_rank")
def _(of_rank: Any) -> Any:
    def wrong(*args: Any, **options: Any) -> Shard:
        shard = of_rank(*args, **options)
        return replace(shard, stores=shard.copies == 1)

    return wrong


@fault("each rank is taken for a holder of other heads", "sizes", Shard, "of_rank")
def _(of_rank: Any) -> Any:
    def wrong(rank: int, ranks: int, heads: int, **options: Any) -> Shard:
        shard = of_rank(rank, ranks, heads, **options)
        return replace(shard, number=(shard.number + 1) % shard.count)

    return wrong


@fault(
    "files of ranks that are no more are dropped", "sizes", chunk_directory.ChunkDirectory, "_adopt"
)
def _(_: Any) -> Any:
    def wrong(self: Any, left: Any) -> None:
        for file in left.glob("*.lmxkv"):
            file.unlink()

    return wrong
