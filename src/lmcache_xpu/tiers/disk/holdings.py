"""What a rank can load from disk: its own files, other ranks', and what can be made of either."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lmcache_xpu.tiers.chunk_key import KeyTexts, Source
from lmcache_xpu.tiers.disk.stored_chunk import Files, StoredChunk

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey

    from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
    from lmcache_xpu.tiers.disk.neighbours import Neighbours

__all__ = ["Holdings"]


class Holdings:
    """Chunks by LMCache's keys, for look-ups and loads. Safe for any number of threads.

    Args:
        store: this rank's files.
        neighbours: other ranks'.
        texts: of keys.
        hidden: elements of a token in one plane of this rank's chunks.
    """

    def __init__(
        self, store: ChunkStore, neighbours: Neighbours, texts: KeyTexts, hidden: int
    ) -> None:
        self._store = store
        self._neighbours = neighbours
        self._texts = texts
        self._hidden = hidden
        self._lock = threading.Lock()
        # By name, for each pin of a chunk that is made of others, the pins of those.
        self._pins: dict[str, list[list[str]]] = {}

    def name(self, key: CacheEngineKey) -> str:
        """Return the store's key of a chunk."""
        return _tagged(self._texts.text(key), key)

    def __contains__(self, key: CacheEngineKey) -> bool:
        """Whether a chunk can be loaded, or was promised to a look-up that lasts."""
        name = self.name(key)
        return self._store.pinned(name) or name in self._pins or self._source(key) is not None

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a chunk from eviction until as many `unpin`; False if it can't be loaded.

        Of a chunk of other shards all that is in this rank's directory is kept, for other ranks,
        too. What another rank has may go: then the load fails, and vLLM computes it.
        """
        name = self.name(key)
        if self._store.pin(name):
            return True
        if (source := self._source(key)) is None:
            return False
        names = [_tagged(text, key) for text in self._texts.siblings(key, source)]
        pinned = [each for each in names if self._store.pin(each)]
        with self._lock:
            self._pins.setdefault(name, []).append(pinned)
        return True

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin back; False if there was none."""
        name = self.name(key)
        with self._lock:
            pins = self._pins.get(name)
            pinned = pins.pop() if pins else None
            if not pins:
                self._pins.pop(name, None)
        if pinned is None:
            return self._store.unpin(name)
        for each in pinned:
            self._store.unpin(each)
        return True

    def find(self, key: CacheEngineKey) -> StoredChunk | None:
        """Return where a chunk's bytes are; None if it can't be loaded."""
        for source in self._sources(key):
            names = [_tagged(text, key) for text in source.texts]
            files = [files for name in names if (files := self._files(name)) is not None]
            if len(files) < len(names):
                continue
            chunk = StoredChunk.find(files, names, source.cut, self._hidden)
            if chunk is not None:
                return chunk
            if source.cut is None:  # of a version that described it otherwise
                self._store.remove(names[0])
        return None

    def touch(self, keys: Iterable[CacheEngineKey]) -> None:
        """Mark what was loaded as used now, the first as the last used; kept over a restart."""
        self._store.touch(name for key in keys for name in self._used(key))

    def _used(self, key: CacheEngineKey) -> list[str]:
        if (name := self.name(key)) in self._store:
            return [name]
        source = self._source(key)
        texts = [] if source is None else self._texts.siblings(key, source)
        return [_tagged(text, key) for text in texts]

    def _sources(self, key: CacheEngineKey) -> Iterator[Source]:
        yield Source((self._texts.text(key),))
        yield from self._texts.sources(key)

    def _source(self, key: CacheEngineKey) -> Source | None:
        """Return the first that is all there."""
        for source in self._sources(key):
            if all(self._files(_tagged(text, key)) is not None for text in source.texts):
                return source
        return None

    def _files(self, name: str) -> Files | None:
        if name in self._store:
            return self._store
        return self._neighbours if self._neighbours.file(name) is not None else None


def _tagged(text: str, key: CacheEngineKey) -> str:
    tags = json.dumps(key.tags, default=str) if key.tags else ""
    return f"{text}\n{tags}"
