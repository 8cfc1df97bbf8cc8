"""What a rank can load from disk, by LMCache's keys."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_xpu.tiers.chunk_key import key_text
from lmcache_xpu.tiers.chunk_layout import ChunkLayout

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey

    from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

__all__ = ["Holdings", "StoredChunk"]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Where a chunk's bytes are.

    Args:
        layout: of the chunk.
        store: that has it.
        name: the store's key.
    """

    layout: ChunkLayout
    store: ChunkStore
    name: str

    def read(self, buffer: memoryview) -> bool:
        """Read the chunk into `buffer`, which has its size; False if that does not hold it now."""
        return self.store.read(self.name, buffer)


class Holdings:
    """Chunks by LMCache's keys, for look-ups and loads. Safe for any number of threads.

    Args:
        store: this rank's files.
        origin: of the engine's chunks, see `chunk_key`.
    """

    def __init__(self, store: ChunkStore, origin: str) -> None:
        self._store = store
        self._origin = origin

    def name(self, key: CacheEngineKey) -> str:
        """Return the store's key of a chunk."""
        tags = json.dumps(key.tags, default=str) if key.tags else ""
        return f"{key_text(self._origin, key)}\n{tags}"

    def __contains__(self, key: CacheEngineKey) -> bool:
        """Whether a chunk can be loaded, or was promised to a look-up that lasts."""
        name = self.name(key)
        return self._store.pinned(name) or name in self._store

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a chunk from eviction until as many `unpin`; False if it can't be loaded."""
        return self._store.pin(self.name(key))

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin back; False if there was none."""
        return self._store.unpin(self.name(key))

    def find(self, key: CacheEngineKey) -> StoredChunk | None:
        """Return where a chunk's bytes are; None if it can't be loaded."""
        name = self.name(key)
        if (info := self._store.info(name)) is None:
            return None
        layout = ChunkLayout.parse(info.meta)
        if layout is None or layout.size != info.payload_bytes:
            self._store.remove(name)  # of a version that described it otherwise
            return None
        return StoredChunk(layout, self._store, name)

    def touch(self, keys: Iterable[CacheEngineKey]) -> None:
        """Mark what was loaded as used now, the first as the last used; kept over a restart."""
        self._store.touch(map(self.name, keys))
