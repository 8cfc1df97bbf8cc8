"""The names of objects of LMCache's server in a chunk store, and their layouts.

A name is LMCache's own JSON form of the object's key. It is also what a directory is read back by:
after a restart LMCache hears which objects are there.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from lmcache.v1.distributed.api import EncodedObjectKey

from lmcache_xpu.tiers.chunk_layout import ChunkLayout

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

__all__ = ["has_layout", "object_key", "object_name"]


def object_name(key: ObjectKey) -> str:
    """Return the name of an object: of its hash, model, rank, object group and salt."""
    return json.dumps(asdict(key.to_encoded_object_key()), sort_keys=True)


def object_key(name: str) -> ObjectKey | None:
    """Return the key that `object_name` wrote; None for a name of another version."""
    try:
        return EncodedObjectKey(**json.loads(name)).to_object_key()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def has_layout(text: str, layout: MemoryLayoutDesc) -> bool:
    """Whether `text`, as `ChunkLayout.text` wrote it, names these shapes and dtypes."""
    stored = ChunkLayout.parse(text)
    if stored is None:  # of another version
        return False
    return stored.shapes == tuple(layout.shapes) and stored.dtypes == tuple(layout.dtypes)
