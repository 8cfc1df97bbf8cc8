"""An engine's KV cache for the fuzzer: layers whose blocks lie in memory in one way or another."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from oracle import Range


@dataclass(frozen=True)
class Layers:
    """A cache to build.

    widths: by layer, bytes of a token in a plane. planes: parts of a block that lie apart, where
    not `across`: a block's layers lie side by side, else each layer has memory of its own.
    padding: bytes behind each block. groups: KV cache groups, over which layers are spread as vLLM
    does it. Each has numbers of its own for a request's blocks: this holds those of the first.
    """

    widths: tuple[int, ...]
    planes: int
    blocks: int
    block_tokens: int
    across: bool
    padding: int
    lead: int
    groups: int = 1

    @property
    def blocks_of_group(self) -> int:
        return self.blocks // self.groups

    def numbers(self, group: int, blocks: Iterable[int]) -> list[int]:
        """A group's blocks beside those of the first group."""
        return [block + group * self.blocks_of_group for block in blocks]

    def names(self, group: int) -> tuple[str, ...]:
        """Of a group's layers."""
        return tuple(f"layer {layer}" for layer in range(group, len(self.widths), self.groups))


@st.composite
def layers(draw: st.DrawFn) -> Layers:
    """Mostly layers that are all alike."""
    width = draw(st.sampled_from((2, 4, 6, 16)))
    count = draw(st.integers(3, 6))
    other = draw(st.sampled_from((width, width, width, 8)))
    across = draw(st.booleans())
    block_tokens = draw(st.sampled_from((1, 2, 3)))
    groups = draw(st.sampled_from((1, 2, 3)))
    return Layers(
        widths=(width,) * (count - 1) + (other,),
        planes=1 if across else draw(st.sampled_from((1, 2))),
        blocks=(12 + 12 // block_tokens) * groups,
        block_tokens=block_tokens,
        across=across,
        padding=draw(st.sampled_from((0, 0, 2, 16))),
        lead=draw(st.integers(0, 3)) * 16,
        groups=groups,
    )


class PagedLayers:
    """A cache full of random bytes, and where its tokens lie."""

    def __init__(self, layout: Layers, seed: int) -> None:
        self.layout = layout
        self.layers = len(layout.widths)
        self._starts: list[list[int]] = []  # by layer and plane
        self._steps: list[int] = []  # by layer, from a block to the next
        pages = [width * layout.block_tokens for width in layout.widths]
        at = layout.lead
        if layout.across:
            step = -(-(sum(pages) + layout.padding) // 16) * 16
            for page in pages:
                self._starts.append([at])
                self._steps.append(step)
                at += page
            end = layout.lead + step * layout.blocks
        else:
            for page in pages:
                step, starts = page + layout.padding, []
                for _ in range(layout.planes):
                    starts.append(at)
                    at += step * layout.blocks
                self._starts.append(starts)
                self._steps.append(step)
            end = at
        noise = random.Random(seed).randbytes(end + 16)
        self.raw = torch.frombuffer(bytearray(noise), dtype=torch.uint8)
        self.engine = {f"layer {layer}": self._tensor(layer) for layer in range(self.layers)}

    def _tensor(self, layer: int) -> torch.Tensor:
        layout, starts = self.layout, self._starts[layer]
        shape = [layout.blocks, layout.planes, layout.block_tokens, layout.widths[layer]]
        apart = starts[1] - starts[0] if layout.planes > 1 else 1
        stride = [self._steps[layer], apart, layout.widths[layer], 1]
        return self.raw.as_strided(shape, stride, starts[0])

    def bytes(self) -> bytes:
        return self.raw.numpy().tobytes()

    def parts(self, layer: int, block: int, first: int, last: int) -> list[Range]:
        """Where some tokens of a block lie in a layer; the block as the first group numbers it."""
        width = self.layout.widths[layer]
        block += layer % self.layout.groups * self.layout.blocks_of_group
        at = block * self._steps[layer] + first * width
        return [(start + at, (last - first) * width) for start in self._starts[layer]]

    def chunk(self, memory: bytes | bytearray, blocks: list[int]) -> list[bytes]:
        """What is stored of some blocks, by group."""
        return [
            b"".join(bytes(memory[at : at + size]) for at, size in self._places(group, blocks))
            for group in range(self.layout.groups)
        ]

    def fill(self, memory: bytearray, blocks: list[int], chunk: list[bytes]) -> None:
        """Write what is loaded of some blocks."""
        for group, content in enumerate(chunk):
            done = 0
            for at, size in self._places(group, blocks):
                memory[at : at + size] = content[done : done + size]
                done += size

    def _places(self, group: int, blocks: list[int]) -> Iterator[Range]:
        """Where a group's part of a chunk lies: by layer and plane, the blocks in order."""
        for layer in range(group, self.layers, self.layout.groups):
            for plane in range(self.layout.planes):
                for block in blocks:
                    yield self.parts(layer, block, 0, self.layout.block_tokens)[plane]
