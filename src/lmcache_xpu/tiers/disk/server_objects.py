"""The objects of LMCache's server in a chunk store: their names, and what LMCache knows of them.

A name is LMCache's own JSON form of the object's key. It is also what a directory is read back by:
after a restart LMCache is told which objects are there.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING

from lmcache.v1.distributed.api import EncodedObjectKey

from lmcache_xpu.tiers.disk.chunk_file import disk_bytes

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey

    from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

__all__ = ["ServerObjects", "object_key", "object_name"]

Sizes = dict["ObjectKey", int]  # the bytes of the objects' files


def object_name(key: ObjectKey) -> str:
    """Return the name of an object: of its hash, model, rank, object group and salt."""
    return json.dumps(asdict(key.to_encoded_object_key()), sort_keys=True)


def object_key(name: str) -> ObjectKey | None:
    """Return the key that `object_name` wrote; None for a name of another version."""
    try:
        return EncodedObjectKey(**json.loads(name)).to_object_key()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


class ServerObjects:
    """The objects that LMCache was told of. Not thread-safe.

    The store reports changes while it is locked, so LMCache can't be told there and then.

    Args:
        store: it is watched from now on.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._changed: deque[str] = deque()
        self._sizes: dict[str, int] = {}
        store.watch(self._changed.append)

    def changes(self) -> tuple[Sizes, Sizes]:
        """Return the objects that are new, and that are gone, since the last call."""
        new, gone = {}, {}
        for name in {self._changed.popleft(): None for _ in range(len(self._changed))}:
            info, before = self._store.info(name), self._sizes.pop(name, 0)
            size = disk_bytes(info.payload_bytes) if info else 0
            if size:
                self._sizes[name] = size
            if size == before:
                continue
            if size:
                new[name] = size
            if before:
                gone[name] = before
        return _by_key(new), _by_key(gone)

    def all(self) -> Sizes:
        """Return all objects that LMCache was told are there."""
        return _by_key(self._sizes)


def _by_key(sizes: dict[str, int]) -> Sizes:
    return {key: size for name, size in sizes.items() if (key := object_key(name))}
