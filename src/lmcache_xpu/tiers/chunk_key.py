"""The texts that name the chunks of LMCache's own engine on a disk.

    DEVICE@KV SHAPE @ RANKS @ RANK @ CHUNK HASH @ DTYPE @ LAYER @ MODEL
    `--- origin --'

LMCache's own text for a key runs tags together and leaves out what the same key could stand for in
another engine with the same directory: its origin. (How an engine packs its blocks is part of the
model's name, as the connector gives it to LMCache.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache import torch_device_type
from lmcache.utils import LayerCacheEngineKey

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.metadata import LMCacheMetadata

__all__ = ["chunk_and_layer", "engine_origin", "is_of_model", "key_text"]


def engine_origin(metadata: LMCacheMetadata) -> str:
    """Return the device and the shape of an engine's KV cache: where its chunks fit."""
    return _origin(metadata.kv_shape)


def key_text(origin: str, key: CacheEngineKey) -> str:
    """Return the text of a chunk, or of one layer of it, without the request's tags.

    Args:
        origin: of the engine.
        key: LMCache's.
    """
    layer = key.layer_id if isinstance(key, LayerCacheEngineKey) else "-"
    rank = f"{key.world_size}@{key.worker_id}"
    return f"{origin}@{rank}@{key.chunk_hash_hex}@{key.dtype}@{layer}@{key.model_name}"


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
