"""Faults of the disk tier and its chunk store."""

from __future__ import annotations

from typing import Any

from fault import Faults

from lmcache_xpu.tiers.disk import chunk_file, chunk_store
from lmcache_xpu.tiers.disk.chunk_index import ChunkIndex
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore
from lmcache_xpu.tiers.disk.lock import DirectoryLock
from lmcache_xpu.tiers.disk.writer import DiskWriter
from lmcache_xpu.tiers.stock_disk import DiskTier

FAULTS = Faults()
fault = FAULTS.add


@fault("checksums are not compared", "disk", chunk_store, "read_chunk")
def _(read: Any) -> Any:
    def wrong(*args: Any) -> str | None:
        result = read(*args)
        return None if result == "its checksum does not match" else result

    return wrong


@fault("a file is not asked whose chunk it holds", "disk", chunk_store, "read_chunk")
def _(read: Any) -> Any:
    def wrong(path: Any, key: str, info: Any, *memory: Any) -> str | None:
        header = chunk_file._parse(path.read_bytes()[: chunk_file.HEADER_BYTES])
        return read(path, header.key, header.info, *memory) if header else "damaged"

    return wrong


@fault("a load goes on when its memory was taken back", "disk", chunk_store, "read_chunk")
def _(read: Any) -> Any:
    def wrong(path: Any, key: str, info: Any, buffer: memoryview, _: Any) -> str | None:
        return read(path, key, info, buffer)

    return wrong


@fault("memory that was taken back is stored", "disk", ChunkStore, "put")
def _(put: Any) -> Any:
    def wrong(self: ChunkStore, key: str, meta: str, payload: Any, **_: Any) -> bool:
        return put(self, key, meta, payload)

    return wrong


@fault("files that were cut are taken after a restart", "disk", chunk_store, "identify_chunk")
def _(_: Any) -> Any:
    def wrong(path: Any) -> Any:
        header = chunk_file._parse(path.read_bytes()[: chunk_file.HEADER_BYTES])
        return header and (header.key, header.info)

    return wrong


@fault("a restart forgets when chunks were used", "disk", ChunkIndex, "add_earlier")
def _(add: Any) -> Any:
    return lambda self, files: add(self, [(0, name, size) for _, name, size in files])


@fault("what was used last goes first", "disk", ChunkIndex, "oldest")
def _(_: Any) -> Any:
    def wrong(self: ChunkIndex) -> tuple[int, str] | None:
        last = max(self.names(), key=lambda name: self.get(name).used_ns, default=None)
        return None if last is None else (0, last)

    return wrong


@fault("the limit is not kept", "disk", ChunkIndex, "fits")
def _(_: Any) -> Any:
    return lambda self, need: True


@fault("a chunk that is removed leaves its file", "disk", ChunkStore, "_remove")
def _(_: Any) -> Any:
    return lambda self, key: self._index.remove(key) is None


@fault("a file is named before it is complete", "disk", chunk_file, "TEMPORARY")
def _(_: Any) -> Any:
    return ".lmxkv.part"


@fault("two stores may have one directory", "disk", DirectoryLock, "_wait")
def _(_: Any) -> Any:
    return lambda self, seconds: None


@fault("a chunk of another model is served after a restart", "tier", DiskTier, "name")
def _(_: Any) -> Any:
    return lambda self, key: key.chunk_hash_hex


@fault("what is queued is not written at the end", "tier", DiskWriter, "close")
def _(_: Any) -> Any:
    def wrong(self: DiskWriter) -> None:
        self._closed = True
        self._threads.shutdown(cancel_futures=True)

    return wrong


@fault("a flipped bit on disk is served", "tier", chunk_file.zlib, "crc32")
def _(_: Any) -> Any:
    return lambda data, crc=0: 7
