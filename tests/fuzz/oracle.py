"""What every transfer must do, token by token, in plain Python on plain bytes.

Nothing here knows the package: where a token lies follows from the letters and steps of a layout,
and from what LMCache says of its formats. So a mistake of the package is not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # first byte, and how many


class MismatchError(AssertionError):
    """Bytes that are not what they must be."""


@dataclass(frozen=True)
class Paged:
    """Where an engine's KV cache has its tokens; all in bytes.

    steps: by letter: l layer, k plane, b block, n token, h head.
    """

    lead: int
    steps: dict[str, int]
    layers: int
    planes: int
    blocks: int
    tokens: int
    heads: int
    head: int  # bytes of a head in a plane
    block: int = 0  # bytes of a block where blocks are opaque, else 0

    @property
    def row(self) -> int:
        return self.heads * self.head

    @property
    def slots(self) -> int:
        return self.blocks * self.tokens

    def parts(self, layer: int, plane: int, slot: int) -> list[Range]:
        """A token's bytes, head by head."""
        at = self.lead + layer * self.steps["l"] + plane * self.steps["k"]
        at += slot // self.tokens * self.steps["b"] + slot % self.tokens * self.steps["n"]
        return [(at + head * self.steps["h"], self.head) for head in range(self.heads)]

    def whole(self, layer: int, slot: int) -> list[Range]:
        """The bytes of a slot's opaque block."""
        at = self.lead + layer * self.steps["l"] + slot // self.tokens * self.steps["b"]
        return [(at, self.block)]


@dataclass(frozen=True)
class Chunk:
    """A chunk in host memory.

    at: its first byte. order: `planes` or `layers`, what comes first; or `rows`, LMCache's
    layerwise format. layers: that its memory has room for; first: the engine's first one in it.
    """

    at: int
    start: int
    end: int
    order: str
    layers: int
    first: int
    count: int  # layers that are moved

    def place(self, paged: Paged, layer: int, plane: int, token: int) -> int:
        """First byte of a token's row in a layer (of the engine) and plane."""
        rows, row, planes = self.end - self.start, paged.row, paged.planes
        layer, token = layer - self.first, token - self.start
        if paged.block:  # whole blocks, layer after layer
            rows, row, planes, token = rows // paged.tokens, paged.block, 1, token // paged.tokens
        number = {
            "planes": (plane * self.layers + layer) * rows + token,
            "layers": (layer * planes + plane) * rows + token,
            "rows": (layer * rows + token) * planes + plane,
        }[self.order]
        return self.at + number * row


def pairs(
    paged: Paged, chunks: Iterable[Chunk], slots: Sequence[int], skip: int = 0
) -> list[tuple[Range, Range]]:
    """Of chunks, which bytes of the engine belong to which of the host.

    Args:
        paged: the engine's KV cache.
        chunks: of one request.
        slots: one per token of the request, negative where it has none.
        skip: leading tokens that are left alone.
    """
    copies = []
    for chunk in chunks:
        for layer in range(chunk.first, chunk.first + chunk.count):
            for plane in range(1 if paged.block else paged.planes):
                for token in range(max(chunk.start, skip), chunk.end):
                    if slots[token] < 0 or (paged.block and token % paged.tokens):
                        continue
                    place = chunk.place(paged, layer, plane, token)
                    slot = slots[token]
                    engine = (
                        paged.whole(layer, slot) if paged.block else paged.parts(layer, plane, slot)
                    )
                    for begin, size in engine:
                        copies.append(((begin, size), (place, size)))
                        place += size
    return copies


def store(cache: bytearray, host: bytearray, moves: Iterable[tuple[Range, Range]]) -> None:
    """From the engine to the host."""
    for (begin, size), (place, _) in moves:
        host[place : place + size] = cache[begin : begin + size]


def load(
    cache: bytearray, host: bytearray, moves: Iterable[tuple[Range, Range]], actual: bytes
) -> None:
    """From the host to the engine.

    Where several tokens have one slot, any of them may come last, byte by byte: `actual` says what
    the engine has now, and is taken if one of them explains it.
    """
    wanted: dict[int, list[tuple[int, int]]] = {}
    for (begin, size), (place, _) in moves:
        wanted.setdefault(begin, []).append((place, size))
    for begin, sources in wanted.items():
        size = sources[0][1]
        values = [host[place : place + size] for place, _ in sources]
        there = actual[begin : begin + size]
        mixed = len(values) > 1 and all(
            byte in seen for byte, *seen in zip(there, *values, strict=True)
        )
        cache[begin : begin + size] = there if mixed else values[-1]


def compare(
    what: str, actual: bytes, wanted: bytes | bytearray, unknown: Sequence[Range] = ()
) -> None:
    """Raises MismatchError at the first byte that differs, outside of what is unknown."""
    if actual == wanted:
        return
    if unknown:
        hidden = bytearray(wanted)
        for begin, size in unknown:
            hidden[begin : begin + size] = actual[begin : begin + size]
        wanted = hidden
        if actual == wanted:
            return
    at = next(
        n for n, (byte, other) in enumerate(zip(actual, wanted, strict=True)) if byte != other
    )
    count = sum(byte != other for byte, other in zip(actual, wanted, strict=True))
    raise MismatchError(f"{what}: {count} of {len(actual)} bytes differ, the first at {at}")
