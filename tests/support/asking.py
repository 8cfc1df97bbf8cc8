"""A scheduler and a worker of a cache in this process, in a few calls."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from lmcache_xpu.cache.local_cache import LocalCache, PromptKeys
from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.cache.protocol import TokenRange

CHUNK, OBJECT, ROOM = 16, 4096, 64  # tokens, bytes, and objects
CPU = torch.device("cpu")


class Asking:
    """A scheduler and a worker of a cache with room for 64 objects.

    Args:
        windows: by KV cache group, the chunks that a hit needs; 0 for all.
        name: of the engine.
        options: of the cache, if others.
    """

    def __init__(
        self,
        windows: tuple[int, ...] = (0,),
        name: str = "one",
        options: LocalCacheOptions | None = None,
    ) -> None:
        options = options or LocalCacheOptions(chunk_tokens=CHUNK, cpu_gib=ROOM * OBJECT / 2**30)
        self.hits: dict[Any, int] = {}  # by handle of a look-up
        self.cache = LocalCache.make(engine(name), options, CPU, 1)
        self.cache.register([OBJECT] * len(windows), windows)
        self.windows, self._numbers = windows, itertools.count()

    def keys(self, prompt: int, chunks: int) -> PromptKeys:
        keys = self.cache.prompt_keys("salt")
        keys.extend([f"{prompt} {number}".encode() for number in range(chunks)])
        return keys

    def store(self, prompt: int, start: int, end: int) -> int:
        """Store chunks of a prompt; how many objects there was room for."""
        number, key = next(self._numbers), chunks(self.keys(prompt, end), start, end)
        slots = self.cache.reserve(number, key, [()] * len(self.windows)).result()
        assert self.cache.commit(number).result() is bool(slots.rows)
        return len(slots.rows)

    def hit_of(self, handle: Any) -> int | None:
        if handle not in self.hits and (hit := self.cache.hit_chunks(handle)) is not None:
            self.hits[handle] = hit
        return self.hits.get(handle)

    def look_up(self, keys: PromptKeys) -> int:
        """Return the chunks of a prompt that can be loaded, which are locked."""
        hit = self.cache.hit_chunks(self.cache.find(keys, len(keys), in_memory=True))
        assert hit is not None
        return hit

    def hit(self, prompt: int, count: int) -> int:
        """Return the chunks of a prompt that can be loaded, once they were."""
        keys, number = self.keys(prompt, count), next(self._numbers)
        if hit := self.look_up(keys):
            assert self.cache.locate(number, chunks(keys, 0, hit)).result()
            self.cache.release(number)
        return hit

    def compute(self, prompt: int, count: int, step: int) -> None:
        """Look a prompt up, and store what is missing, so many chunks in a step."""
        for start in range(self.hit(prompt, count), count, step):
            self.store(prompt, start, min(count, start + step))

    @property
    def held(self) -> int:
        return int(self.cache.memory_use()[0] // OBJECT)


def chunks(keys: PromptKeys, first: int, last: int) -> TokenRange:
    return TokenRange("request", keys, first * CHUNK, last * CHUNK)


def engine(name: str, **parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"world_size": 1, "data_parallel_index": 0, **parallel}),
        kv_transfer_config=SimpleNamespace(engine_id=name),
        model_config=SimpleNamespace(model="model"),
    )
