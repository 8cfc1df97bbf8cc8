"""A chunk that can be loaded from disk: from one file, or out of files of other shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.chunk_file import ChunkInfo
from lmcache_xpu.tiers.shard import Cut, rows

__all__ = ["Files", "StoredChunk"]


class Files(Protocol):
    """Chunks under keys, this rank's or others'."""

    def info(self, key: str) -> ChunkInfo | None:
        """Return what is known of a chunk without reading its payload; None if there is none."""

    def read(self, key: str, buffer: memoryview) -> bool:
        """Read a payload into a buffer of its length; False if that does not hold it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """Where a chunk's bytes are.

    Args:
        layout: of the chunk.
        files: of the chunks that it is read from.
        keys: of these.
        payload_bytes: of each.
        cut: how it is made of them; None for the same chunk.
    """

    layout: ChunkLayout
    files: Sequence[Files]
    keys: Sequence[str]
    payload_bytes: int
    cut: Cut | None = None

    @classmethod
    def find(
        cls, files: Sequence[Files], keys: Sequence[str], cut: Cut | None, hidden: int
    ) -> Self | None:
        """Return the chunk; None if headers don't fit each other, or what is wanted.

        Args:
            files, keys, cut: see the class.
            hidden: elements of a token in one plane of this rank's chunks.
        """
        infos = {each.info(key) for each, key in zip(files, keys, strict=True)}
        info = infos.pop() if len(infos) == 1 else None
        if info is None:
            return None
        layout = ChunkLayout.parse(info.meta)
        if layout is None or layout.size != info.payload_bytes:
            return None
        if cut is not None:
            layout = layout.resized(cut.width(hidden), hidden)
        if layout is None:
            return None
        return cls(layout=layout, files=files, keys=keys, payload_bytes=info.payload_bytes, cut=cut)

    def read(self, buffer: memoryview) -> bool:
        """Read the chunk into `buffer`, which has its size; False if that does not hold it now."""
        if self.cut is None:
            return self.files[0].read(self.keys[0], buffer)
        row_bytes = self.layout.row_bytes
        target = rows(buffer, row_bytes)
        for position, (files, key) in enumerate(zip(self.files, self.keys, strict=True)):
            payload = memoryview(bytearray(self.payload_bytes))
            if not files.read(key, payload):
                return False
            self.cut.place(position, rows(payload, self.cut.width(row_bytes)), target)
        return True
