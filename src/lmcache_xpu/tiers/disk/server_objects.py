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

    Attributes:
        sizes: of their files, in bytes.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.sizes: dict[ObjectKey, int] = {}
        self._store = store
        self._changed: deque[str] = deque()
        store.watch(self._changed.append)

    def changes(self) -> tuple[dict[ObjectKey, int], dict[ObjectKey, int]]:
        """Return the objects that are new, and that are gone, since the last call, with sizes."""
        new: dict[ObjectKey, int] = {}
        gone: dict[ObjectKey, int] = {}
        for name in dict.fromkeys(self._changed.popleft() for _ in range(len(self._changed))):
            if (key := object_key(name)) is None:
                continue
            info, before = self._store.info(name), self.sizes.pop(key, 0)
            size = disk_bytes(info.payload_bytes) if info else 0
            if size:
                self.sizes[key] = size
            if size != before:
                new |= {key: size} if size else {}
                gone |= {key: before} if before else {}
        return new, gone
