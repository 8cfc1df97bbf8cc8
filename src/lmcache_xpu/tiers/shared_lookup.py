"""Which chunks a server of the shared tier has, of this rank's or to make them of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_xpu.tiers.chunk_key import KeyTexts, Source

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from redis.asyncio import Redis

__all__ = ["FORMAT", "SharedLookup"]

# The version of a value, as part of its name: engines with another one share a server with these,
# and neither finds what the other stores.
FORMAT = "kv2"


class SharedLookup:
    """Look-ups of one rank in a server. All of them raise what the client raises.

    Args:
        server: its client.
        texts: of keys.
    """

    def __init__(self, server: Redis, texts: KeyTexts) -> None:
        self._server = server
        self._texts = texts

    def name(self, text: str) -> str:
        """Return the server's key of a chunk, of the text of LMCache's."""
        return f"{FORMAT}@{text}"

    async def prefix(
        self, keys: Sequence[CacheEngineKey], report: Callable[[CacheEngineKey, bool], None]
    ) -> int:
        """Return how many chunks are there, or can be made of other shards', before one is not.

        What the first one could be made of is asked for along with the chunks: a prompt of which
        nothing is there takes one round trip, and one more where a later chunk is missing.

        Args:
            keys: of a prompt.
            report: told of each key whether the server has its chunk.
        """
        own = [Source((self._texts.text(key),)) for key in keys]
        sources = list(self._texts.sources(keys[0]))
        answers = await self.complete([*own, *sources])
        stored, ways = answers[: len(keys)], answers[len(keys) :]
        for key, is_stored in zip(keys, stored, strict=True):
            report(key, is_stored)
        while False in stored:
            missing = stored.index(False)
            if missing:
                ways = await self.complete(list(self._texts.sources(keys[missing])))
            if True not in ways:
                return missing
            way, after = ways.index(True), missing + 1
            likewise = [list(self._texts.sources(key))[way] for key in keys[after:]]
            made = await self.complete(likewise)
            there = [either or other for either, other in zip(stored[after:], made, strict=True)]
            stored[missing:] = [True, *there]
        return len(keys)

    async def complete(self, sources: Sequence[Source]) -> list[bool]:
        """Return of each source whether the server has all of it; in one round trip."""
        if not sources:
            return []
        async with self._server.pipeline(transaction=False) as pipeline:
            for source in sources:
                pipeline.exists(*(self.name(text) for text in source.texts))
            counts: list[int] = await pipeline.execute()
        return [n == len(source.texts) for n, source in zip(counts, sources, strict=True)]
