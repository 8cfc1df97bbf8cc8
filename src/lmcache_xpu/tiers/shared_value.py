"""A value of the shared tier: a chunk with its checksum, or what another chunk is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_xpu.tiers.chunk_layout import ChunkLayout
from lmcache_xpu.tiers.disk.chunk_file import unpack_chunk
from lmcache_xpu.tiers.shard import Cut, rows

__all__ = ["SharedValue", "make", "unpack"]


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A chunk as the server gave it.

    Args:
        layout: of the chunk.
        payload: its bytes.
    """

    layout: ChunkLayout
    payload: memoryview


def unpack(name: str, value: bytes, whole: ChunkLayout, partial: bool = False) -> SharedValue:
    """Read a value. Takes milliseconds for a large one: a thread's work.

    Its header's layout is compared as text, not read: whoever writes to the server wrote that, too.

    Args:
        name: of its key.
        value: what the server gave.
        whole: the layout of a whole chunk.
        partial: it may also be one of fewer tokens.

    Raises:
        ValueError: says what is wrong with it.
    """
    meta, payload = unpack_chunk(memoryview(value), name)
    tokens = whole.shapes[0][2]
    if partial and 0 < len(payload) < whole.size:
        tokens = max(1, tokens * len(payload) // whole.size)
    shapes = tuple(torch.Size([*shape[:2], tokens, *shape[3:]]) for shape in whole.shapes)
    layout = ChunkLayout(shapes, whole.dtypes, whole.fmt)
    if (meta, len(payload)) != (layout.text, layout.size):
        raise ValueError(
            f"found {len(payload)} bytes of {meta[:200]!r}; expected {layout.size} of {layout.text}"
        )
    return SharedValue(layout, payload)


def make(values: Sequence[SharedValue], cut: Cut | None, hidden: int) -> SharedValue | None:
    """Return the chunk that others make; None where they don't fit. A thread's work, as above.

    Args:
        values: all that it is made of.
        cut: how; None for the same chunk.
        hidden: elements of a token in one plane of this rank's chunks.
    """
    if cut is None:
        return values[0]
    layouts = {value.layout for value in values}
    layout = layouts.pop().resized(cut.width(hidden), hidden) if len(layouts) == 1 else None
    if layout is None:
        return None
    payload, row_bytes = memoryview(bytearray(layout.size)), layout.row_bytes
    for position, value in enumerate(values):
        source = rows(memoryview(value.payload), cut.width(row_bytes))
        cut.place(position, source, rows(payload, row_bytes))
    return SharedValue(layout, payload)
