"""An engine's KV cache for the fuzzer: layers whose blocks lie in memory in one way or another."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from oracle import Range


@dataclass(frozen=True)
class Layers:
    """A cache to build.

    widths: by layer, bytes of a token in a plane. planes: parts of a block that lie apart, where
    not `across`: a block's layers lie side by side, else each layer has memory of its own.
    padding: bytes behind each block.
    """

    widths: tuple[int, ...]
    planes: int
    blocks: int
    block_tokens: int
    across: bool
    padding: int
    lead: int


@st.composite
def layers(draw: st.DrawFn) -> Layers:
    """Mostly layers that are all alike."""
    width = draw(st.sampled_from((2, 4, 6, 16)))
    count = draw(st.integers(3, 6))
    other = draw(st.sampled_from((width, width, width, 8)))
    across = draw(st.booleans())
    block_tokens = draw(st.sampled_from((1, 2, 3)))
    return Layers(
        widths=(width,) * (count - 1) + (other,),
        planes=1 if across else draw(st.sampled_from((1, 2))),
        blocks=12 + 12 // block_tokens,
        block_tokens=block_tokens,
        across=across,
        padding=draw(st.sampled_from((0, 0, 2, 16))),
        lead=draw(st.integers(0, 3)) * 16,
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
        """Where some tokens of a block lie in a layer."""
        width = self.layout.widths[layer]
        at = block * self._steps[layer] + first * width
        return [(start + at, (last - first) * width) for start in self._starts[layer]]

    def chunk(self, memory: bytes | bytearray, blocks: list[int]) -> bytes:
        """What is stored of some blocks: layer by layer, part by part, the blocks in order."""
        planes = range(self.layout.planes)
        return b"".join(
            bytes(memory[at : at + size])
            for layer in range(self.layers)
            for plane in planes
            for block in blocks
            for at, size in [self.parts(layer, block, 0, self.layout.block_tokens)[plane]]
        )

    def fill(self, memory: bytearray, blocks: list[int], chunk: bytes) -> None:
        """Write what is loaded of some blocks."""
        done = 0
        for layer in range(self.layers):
            for plane in range(self.layout.planes):
                for block in blocks:
                    at, size = self.parts(layer, block, 0, self.layout.block_tokens)[plane]
                    memory[at : at + size] = chunk[done : done + size]
                    done += size
