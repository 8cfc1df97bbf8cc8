"""Random layouts of an engine's KV cache: shapes, orders in memory, paddings, offsets, dtypes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from oracle import Paged

from lmcache_xpu.transfer.layout import Geometry

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn)

# By form: the letters of the tensors that the engine hands over, and those that it does not have.
FORMS = {
    "fused": ("bhnc", "l"),
    "opaque": ("bhnc", "l"),
    "latent": ("bhnc", "l"),
    "latent, no heads": ("bnc", "l"),
    "keys first": ("kbnhd", "l"),
    "keys first, heads": ("kbhnd", "l"),
    "blocks first": ("bknhd", "l"),
    "blocks first, heads": ("bkhnd", "l"),
    "pair": ("bnhd", "lk"),
    "pair, heads": ("bhnd", "lk"),
}


@dataclass(frozen=True)
class Layout:
    """A cache to build; `memory` has all letters, the outermost first."""

    form: str
    memory: str
    sizes: dict[str, int]
    padding: dict[str, int]  # elements between neighbours in this dimension
    lead: int  # elements before the first
    dtype: torch.dtype
    named: bool  # the engine says how its memory is ordered

    @property
    def axes(self) -> str:
        return FORMS[self.form][0]

    @property
    def mla(self) -> bool:
        return self.form.startswith("latent")

    @property
    def opaque(self) -> bool:
        return self.form == "opaque"

    @property
    def planes(self) -> int:
        return 1 if self.mla else 2

    @property
    def head(self) -> int:
        """Elements of a head in one plane."""
        content = self.sizes.get("c", self.sizes.get("d", 0))
        return content if self.mla or "d" in self.sizes else content // 2

    @property
    def hidden(self) -> int:
        return self.sizes.get("h", 1) * self.head

    @property
    def hint(self) -> str | None:
        """What the engine calls it: a vLLM layout name, or NHD or HND."""
        if not self.named:
            return None
        if "c" in self.memory:
            return self.memory.upper() if "h" in self.memory else None
        return "NHD" if self.memory.index("n") < self.memory.index("h") else "HND"

    @property
    def geometry(self) -> Geometry:
        return Geometry(hidden=self.hidden, mla=self.mla, kv_layout=self.hint)

    def steps(self) -> tuple[dict[str, int], int]:
        """Elements from one to the next by letter, and of all of it."""
        steps, step = {}, 1
        for letter in reversed(self.memory):
            step += self.padding.get(letter, 0)
            steps[letter] = step
            step *= self.sizes[letter]
        return steps, step


class Cache:
    """A cache on a buffer of its own, full of random bytes."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        steps, size = layout.steps()
        self._steps = steps
        width = layout.dtype.itemsize
        total = (layout.lead + size + 5) * width
        self.raw = torch.frombuffer(
            bytearray(random.Random(seed).randbytes(total)), dtype=torch.uint8
        )
        self.engine = self._tensors(self.raw.view(layout.dtype))
        sizes = layout.sizes
        in_bytes = {letter: step * width for letter, step in steps.items()}
        in_bytes.setdefault("h", 0)
        in_bytes.setdefault("k", layout.head * width)  # side by side in the content
        inside = sizes["n"] * sizes.get("h", 1) * sizes["c"] if layout.opaque else 0
        self.paged = Paged(
            lead=layout.lead * width,
            steps=in_bytes,
            layers=sizes["l"],
            planes=layout.planes,
            blocks=sizes["b"],
            tokens=sizes["n"],
            heads=sizes.get("h", 1),
            head=layout.head * width,
            block=inside * width,
        )

    def bytes(self) -> bytes:
        return self.raw.numpy().tobytes()

    def _tensors(self, flat: torch.Tensor) -> list:
        layout = self.layout
        shape = [layout.sizes[letter] for letter in layout.axes]
        stride = [self._steps[letter] for letter in layout.axes]

        def tensor(layer: int, plane: int) -> torch.Tensor:
            at = layout.lead + layer * self._steps["l"] + plane * self._steps.get("k", 0)
            return flat.as_strided(shape, stride, at)

        layers = range(layout.sizes["l"])
        if layout.form.startswith("pair"):
            return [(tensor(layer, 0), tensor(layer, 1)) for layer in layers]
        return [tensor(layer, 0) for layer in layers]


@st.composite
def layouts(draw: st.DrawFn, forms: tuple[str, ...] = tuple(FORMS), **fixed: int) -> Layout:
    """Any layout that the package says it reads; `fixed` are sizes by letter."""
    form = draw(st.sampled_from(forms))
    axes, outside = FORMS[form]
    last = axes[-1]
    dtype = draw(st.sampled_from(DTYPES))
    sizes = {
        "l": draw(st.integers(1, 5)),
        "b": draw(st.integers(3, 8)),  # of two, keys and values could not be told from blocks
        "n": draw(st.sampled_from((1, 2, 3, 4, 8))),
        "h": draw(st.sampled_from((1, 2, 3))),
        "k": 2,
        "d": draw(st.sampled_from((1, 2, 3, 4, 8))),
    } | fixed
    sizes["c"] = sizes["d"] if form.startswith("latent") else 2 * sizes["d"]
    if form.startswith("latent"):
        sizes["h"] = 1
    letters = axes + outside
    sizes = {letter: sizes[letter] for letter in letters}
    inner = "hnc" if form == "opaque" else last
    outer = "".join(draw(st.permutations([a for a in letters if a not in inner])))
    memory = outer + "".join(draw(st.permutations(inner)))
    room = st.sampled_from((0, 0, 0, 1, 2, 8))
    padding = {letter: draw(room) for letter in outer}
    named = draw(st.booleans()) or sizes["n"] == sizes.get("h")
    return Layout(form, memory, sizes, padding, draw(st.integers(0, 9)), dtype, named)
