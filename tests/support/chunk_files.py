"""Chunks and files of a chunk store, for its tests."""

from __future__ import annotations

import random

from lmcache_xpu.tiers.disk.chunk_file import file_name
from lmcache_xpu.tiers.disk.chunk_store import ChunkStore

KIB = 1024
NO_LIMIT = 1 << 40


def payload(key, size=3 * KIB):
    return random.Random(key).randbytes(size)


def load(store, key):
    """The payload, or None on a miss."""
    info = store.info(key)
    if info is None:
        return None
    buffer = bytearray(info.payload_bytes)
    return bytes(buffer) if store.read(key, memoryview(buffer)) else None


def files(directory):
    return sorted(p for p in directory.iterdir() if p.suffix == ".lmxkv")


def reopened(store, limit=NO_LIMIT):
    store.close()
    return ChunkStore(store.directory, limit, lock_seconds=0)


def file_of(store, key):
    """Where a chunk is, or would be."""
    return store.directory / file_name(key)
