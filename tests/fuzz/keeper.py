"""The cache in the engine's process, watched: what it lends, and what is published."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from unittest import mock

import oracle
import torch
from late_device import LateDevice
from running import Running, Storing

from lmcache_xpu.cache import local_cache
from lmcache_xpu.cache.local_cache import LocalCache, PromptKeys
from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.cache.protocol import Answer, TokenRange

PAGE = 4096  # of LMCache's memory
CPU = torch.device("cpu")


class WatchedCache(LocalCache):
    """Compares what is published and what is located with what it must be."""

    keeper: Keeper

    def locate(self, number: int, key: TokenRange) -> Any:
        answer = super().locate(number, key)
        if (slots := answer.result()) is None:
            missing = "a chunk is missing that a look-up has locked"
            self.keeper.errors.append(oracle.MismatchError(missing))
        first = key.start // self.chunk_tokens
        for group, chunk, offset, _ in slots.rows if slots else ():
            wanted = self.keeper.chunks[group, key.tokens.by_group[group][first + chunk]]
            self.keeper.compare("what is located", offset, wanted)
        return answer

    def reserve(self, number: int, key: TokenRange, skipped: Any) -> Any:
        answer = super().reserve(number, key, skipped)
        self.keeper.reserved[number] = key, answer.result().rows
        self.keeper.device.pause()
        return answer

    def commit(self, number: int, key: TokenRange | None = None) -> Answer[bool]:
        chunks, rows = self.keeper.reserved.pop(number)
        first = chunks.start // self.chunk_tokens
        if (store := self.keeper.stores.get(id(chunks.tokens))) is not None:
            for group, chunk, offset, _ in rows:
                wanted = store.chunks[first + chunk][group]
                self.keeper.compare("what is published", offset, wanted)
                self.keeper.chunks[group, chunks.tokens.by_group[group][first + chunk]] = wanted
                store.committed.append(chunk)
        return super().commit(number)


class Keeper:
    """A cache with room for so many objects of each KV cache group, all of one page.

    Attributes:
        chunks: what each group's must hold, also of those that have gone.
        reserved: by number of the question, what is not published yet.
        stores: by what they store, those on their way.
        errors: of calls that the package made.
    """

    def __init__(self, device: LateDevice, places: int, chunk_tokens: int, groups: int) -> None:
        self.device = device
        self.groups = groups
        self.chunks: dict[tuple[int, Any], bytes] = {}
        self.reserved: dict[int, tuple[TokenRange, Any]] = {}
        self.stores: dict[int, Storing] = {}
        self.errors: list[oracle.MismatchError] = []
        self._numbers = itertools.count(-1, -1)
        options = LocalCacheOptions(
            chunk_tokens=chunk_tokens, cpu_gib=places * groups * PAGE / 2**30
        )
        self.cache = WatchedCache(options, CPU, "model")
        self.cache.keeper = self
        self.memory = self.cache.memory()

    def keys(self, content: int, chunks: int) -> PromptKeys:
        keys = self.cache.prompt_keys("salt")
        keys.extend([f"{content} {number}".encode() for number in range(chunks)])
        return keys

    def keys_to_store(self, request: Running, store: Storing) -> PromptKeys:
        """The request's keys again, by which its store is known."""
        keys = self.keys(request.prompt.content, request.tokens // self.cache.chunk_tokens)
        self.stores[id(keys)] = store
        store.keys = keys
        return keys

    def look_up(self, keys: PromptKeys) -> int:
        """How many chunks are there, which are locked from now on."""
        hit = self.cache.hit_chunks(self.cache.find(keys, len(keys), in_memory=True))
        assert hit is not None
        return hit

    def compare(self, what: str, offset: int, wanted: bytes) -> None:
        there = self.memory.pool[offset : offset + len(wanted)].numpy().tobytes()
        try:
            oracle.compare(what, there, wanted)
        except oracle.MismatchError as error:  # the package would take it for a failed transfer
            self.errors.append(error)

    def raise_errors(self) -> None:
        for error in self.errors:
            raise error

    def crowd(self, places: int) -> None:
        """Others store, and what was stored goes as far as it may; with noise in its place."""
        keys, number = self.cache.prompt_keys("others"), next(self._numbers)
        keys.extend([f"{number} {chunk}".encode() for chunk in range(places)])
        others = TokenRange("others", keys, 0, places * self.cache.chunk_tokens)
        for _, _, offset, size in (
            LocalCache.reserve(self.cache, number, others, [()] * self.groups).result().rows
        ):
            noise = torch.randint(256, (size,), dtype=torch.uint8)
            self.memory.pool[offset : offset + size] = noise
        LocalCache.commit(self.cache, number)

    def check_locks(self) -> None:
        """When nothing is on its way, all may go but what failed stores have reserved."""
        with mock.patch.object(local_cache, "RESET_S", 0.0):
            self.cache.reset()
        left = sum(len(rows) for _, rows in self.reserved.values()) * PAGE
        if (used := self.cache.memory_use()[0]) != left:
            raise oracle.MismatchError(f"{used} bytes are locked, {left} should be")

    def close(self) -> None:
        """In a thread: LMCache's threads end within seconds."""
        threading.Thread(target=self.cache.close).start()
