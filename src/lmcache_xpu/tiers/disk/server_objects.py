"""The names of LMCache's objects in a chunk store: LMCache's own JSON form of an object's key."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from lmcache.v1.distributed.api import EncodedObjectKey

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey

__all__ = ["object_key", "object_name"]


def object_name(key: ObjectKey) -> str:
    """Return the name of an object: of its hash, model, rank, object group and salt."""
    return json.dumps(asdict(key.to_encoded_object_key()), sort_keys=True)


def object_key(name: str) -> ObjectKey | None:
    """Return the key that `object_name` wrote; None for a name of another version."""
    try:
        return EncodedObjectKey(**json.loads(name)).to_object_key()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
