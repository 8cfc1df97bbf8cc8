"""Which objects a chunk store holds, as LMCache's server has been told."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from lmcache_xpu.tiers.disk.chunk_file import disk_bytes
from lmcache_xpu.tiers.disk.object_name import object_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmcache.v1.distributed.api import ObjectKey

    from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

__all__ = ["ServerIndex", "Sizes"]


class Sizes(NamedTuple):
    """Objects, and the bytes that their files take."""

    keys: list[ObjectKey]
    sizes: list[int]


class ServerIndex:
    """What has changed in a store since LMCache heard of it. `settle` and `all` exclude each other.

    The store reports changes while it is locked, so LMCache can't be told there and then.

    Args:
        store: it is watched from now on.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._changed: deque[str] = deque()
        self._sizes: dict[str, int] = {}  # of what LMCache has been told
        store.watch(lambda name, _: self._changed.append(name))

    def settle(self) -> tuple[Sizes, Sizes]:
        """Return what has come and what has gone since the last call."""
        come, gone = [], []
        for name in {self._changed.popleft(): None for _ in range(len(self._changed))}:
            info, told = self._store.info(name), self._sizes.pop(name, None)
            size = disk_bytes(info.payload_bytes) if info else None
            if size is not None:
                self._sizes[name] = size
            if size == told:
                continue
            if told is not None:
                gone.append((name, told))
            if size is not None:
                come.append((name, size))
        return _sizes(come), _sizes(gone)

    def all(self) -> Sizes:
        """Return all that LMCache has been told is there."""
        return _sizes(self._sizes.items())


def _sizes(objects: Iterable[tuple[str, int]]) -> Sizes:
    keys = [(object_key(name), size) for name, size in objects]
    return Sizes([key for key, _ in keys if key], [size for key, size in keys if key])
