"""How a chunk's bytes become an LMCache memory object again, and how the object is named."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.api import EncodedObjectKey, MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_xpu.metrics import Flow


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The shapes, dtypes and format that a chunk is allocated by before its bytes are read."""

    _bytes_tokens: ClassVar[int] = 0

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    fmt: MemoryFormat

    @classmethod
    def of(cls, obj: MemoryObj) -> ChunkLayout | None:
        """Return a chunk's layout; None if it can't bring back the chunk: a serialised one, say."""
        meta = obj.metadata
        if meta.dtype is None or meta.cached_positions is not None:
            return None
        shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
        return cls(tuple(shapes), tuple(dtypes), meta.fmt)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def parse(text: str) -> ChunkLayout | None:
        """Read what `text` wrote; None for what another version, or anyone, has written."""
        try:
            fmt, shapes, names = json.loads(text)
            dtypes = tuple(getattr(torch, name) for name in names)
            layout = ChunkLayout(tuple(map(torch.Size, shapes)), dtypes, MemoryFormat[fmt])
            valid = all(isinstance(dtype, torch.dtype) for dtype in dtypes)
            valid = valid and all(size > 0 for shape in layout.shapes for size in shape)
            return layout if valid and layout.size else None
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
            return None

    @staticmethod
    def is_of(text: str, layout: MemoryLayoutDesc) -> bool:
        """Whether what `text` wrote has these shapes and dtypes."""
        own, wanted = ChunkLayout.parse(text), (tuple(layout.shapes), tuple(layout.dtypes))
        return own is not None and (own.shapes, own.dtypes) == wanted

    @classmethod
    def bytes_have_tokens(cls, tokens: int) -> None:
        """Say of how many tokens the chunks are whose shape is a size in bytes, in this process."""
        cls._bytes_tokens = tokens

    @property
    def text(self) -> str:
        """The layout as a file's header holds it: JSON."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return json.dumps([self.fmt.name, [list(shape) for shape in self.shapes], dtypes])

    @property
    def size(self) -> int:
        """Size of the payload, bytes."""
        return sum(s.numel() * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def tokens(self) -> int:
        """Count the tokens of the chunk."""
        if self.dtypes == (torch.uint8,) and self.shapes[0][:-1] == (1, 1):
            return ChunkLayout._bytes_tokens
        # Not LMCache's `token_dim`: it is of other formats where one layer is a chunk's object.
        dimension = 0 if self.fmt == MemoryFormat.KV_T2D else -2
        return int(self.shapes[0][dimension])

    def count(self, flow: Flow, key: CacheEngineKey | ObjectKey, begun: float) -> None:
        """Count a move since `begun`, by `perf_counter`; a chunk's first part counts its tokens."""
        is_first = not (getattr(key, "layer_id", 0) or getattr(key, "object_group_id", 0))
        tokens = self.tokens if is_first else 0
        flow.moved(time.perf_counter() - begun, size_bytes=self.size, tokens=tokens)


def object_name(key: ObjectKey) -> str:
    """Return the name of an object of LMCache's server, which is LMCache's JSON form of its key."""
    return json.dumps(asdict(key.to_encoded_object_key()), sort_keys=True)


def object_key(name: str) -> ObjectKey | None:
    """Return the key that `object_name` wrote; None for a name of another version."""
    try:
        return EncodedObjectKey(**json.loads(name)).to_object_key()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
