"""The texts that name chunks on a disk and in a server.

    DEVICE@KV SHAPE @ SHARDS @ SHARD @ CHUNK HASH @ DTYPE @ LAYER @ MODEL
    `--- origin --'

LMCache's own text for a key runs tags together and leaves out what the same key could stand for in
another engine with the same directory or server: its origin. (How an engine packs its blocks is
part of the model's name, as the cache engine gives it to LMCache.)

A shard is what a rank holds of the KV heads. Where no two ranks hold the same, there are as many as
ranks, and a rank's number is its shard's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache import torch_device_type
from lmcache.utils import LayerCacheEngineKey

from lmcache_xpu.tiers.shard import Cut, shard_of

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["KeyTexts", "Source", "chunk_and_layer", "engine_origin", "is_of_model", "key_text"]


@dataclass(frozen=True, slots=True)
class Source:
    """Chunks that another one can be made of.

    Args:
        texts: of their keys.
        cut: how; None for one that is the same.
    """

    texts: tuple[str, ...]
    cut: Cut | None = None


class KeyTexts:
    """The texts of one rank's chunks.

    Args:
        metadata: LMCache's description of the engine, with the rank's shard where it has one.
    """

    def __init__(self, metadata: LMCacheMetadata) -> None:
        self.shard = shard_of(metadata)
        self._model = metadata.model_name
        self._origin = engine_origin(metadata)
        self._cuts = list(self.shard.cuts())
        self._world: int = metadata.world_size
        # As versions named what several ranks hold that kept a copy for each, on disk, or one of
        # MLA's in a server.
        copies = self.shard.copies > 1
        self._ranks = sorted({metadata.worker_id, self.shard.first_rank}) if copies else []
        layers, planes, tokens, _, head_size = metadata.kv_shape
        self._origins = {
            count: _origin((layers, planes, tokens, self.shard.heads // count, head_size))
            for count in (self.shard.count, *(cut.count for cut in self._cuts))
            if self.shard.heads
        }
        self._own = f"{self._origin}@{self.shard.count}@{self.shard.number}@"
        self._usable = (
            self._own,
            *(f"{self._origin}@{self._world}@{rank}@" for rank in self._ranks),
            *(
                f"{self._origins[cut.count]}@{cut.count}@{number}@"
                for cut in self._cuts
                for number in cut.numbers
            ),
        )

    def text(self, key: CacheEngineKey) -> str:
        """Return the text of a chunk of this rank, or of one layer of it."""
        if self.shard.copies == 1:
            return key_text(self._origin, key)
        return key_text(self._origin, key, self.shard.count, self.shard.number)

    def sources(self, key: CacheEngineKey) -> Iterator[Source]:
        """Yield what a chunk that is missing can be made of, in the order in which to look."""
        for rank in self._ranks:
            yield Source((key_text(self._origin, key, self._world, rank),))
        if isinstance(key, LayerCacheEngineKey):
            return
        for cut in self._cuts:
            origin = self._origins[cut.count]
            yield Source(
                tuple(key_text(origin, key, cut.count, number) for number in cut.numbers), cut
            )

    def siblings(self, key: CacheEngineKey, source: Source) -> list[str]:
        """Return the texts of all shards of a source's chunk: other ranks need them."""
        if source.cut is None:
            return list(source.texts)
        count = source.cut.count
        return [key_text(self._origins[count], key, count, number) for number in range(count)]

    def is_own(self, text: str) -> bool:
        """Whether a text names a chunk of this rank's shard, or a layer of one."""
        return text.startswith(self._own) and text.endswith(f"@{self._model}")

    def is_usable(self, text: str) -> bool:
        """Whether this rank can load a chunk with this text, or a part of it."""
        return text.startswith(self._usable) and text.endswith(f"@{self._model}")

    def is_of_model(self, text: str) -> bool:
        """Whether a text names a chunk of this model, of any rank and TP size looked for."""
        origins = {self._origin, *self._origins.values()}
        return any(is_of_model(text, origin, self._model) for origin in origins)


def engine_origin(metadata: LMCacheMetadata) -> str:
    """Return the device and the shape of an engine's KV cache: where its chunks fit."""
    return _origin(metadata.kv_shape)


def key_text(
    origin: str, key: CacheEngineKey, count: int | None = None, number: int | None = None
) -> str:
    """Return the text of a chunk, or of one layer of it, without the request's tags.

    Args:
        origin: of the engine.
        key: LMCache's.
        count: of shards; None: of ranks.
        number: of the shard; None: of the rank.
    """
    layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else "-"
    count = key.world_size if count is None else count
    number = key.worker_id if number is None else number
    return f"{origin}@{count}@{number}@{key.chunk_hash_hex}@{key.dtype}@{layer}@{key.model_name}"


def chunk_and_layer(text: str) -> tuple[str, int]:
    """Return the chunk's hash and the layer of a key's text; layer 0 where it names all layers."""
    parts = text.split("@")
    layer = parts[6]
    return parts[4], 0 if layer == "-" else int(layer)


def is_of_model(text: str, origin: str, model_name: str) -> bool:
    """Whether the text names a chunk of this model, of an engine of this origin."""
    return text.startswith(f"{origin}@") and text.endswith(f"@{model_name}")


def _origin(shape: tuple[int, ...]) -> str:
    return f"{torch_device_type}@{shape}"
