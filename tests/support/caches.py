"""Engine KV caches of every layout, with a truth that does not use the package under test.

Each cache lies in one flat buffer filled with random bytes, with margins before and after, so
that a test can compare every byte that should and should not have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import PagedView

# The tests run where an accelerator is, else on CPU; see also `intel`, which says "xpu" here.
DEVICE = str(torch.accelerator.current_accelerator() or "cpu")
MARGIN = 64  # elements before and after the cache; also makes the storage offset non-zero


@dataclass(frozen=True)
class Spec:
    """A cache to build: `kind` names the layout, the rest its sizes."""

    kind: str
    dtype: torch.dtype = torch.bfloat16
    layers: int = 3
    blocks: int = 6
    tokens: int = 4
    heads: int = 2
    dim: int = 8

    def __str__(self) -> str:
        return f"{self.kind}-{str(self.dtype).removeprefix('torch.')}"


@dataclass
class EngineCache:
    """A built cache.

    raw: the whole buffer; engine: what an engine would hand over; truth: [plane][layer], each
    [block, token, head, dim] on `raw`.
    """

    spec: Spec
    geometry: Geometry
    raw: torch.Tensor
    engine: list
    truth: list[list[torch.Tensor]] = field(repr=False)

    @property
    def slots(self) -> int:
        return self.spec.blocks * self.spec.tokens

    @property
    def planes(self) -> int:
        return len(self.truth)

    def host(self, tokens: int) -> torch.Tensor:
        """Host memory for a chunk, random bytes."""
        shape = (self.planes, self.spec.layers, tokens, self.geometry.hidden)
        return noise(shape, self.spec.dtype)

    def token(self, plane: int, layer: int, slot: int) -> torch.Tensor:
        """One token's elements, flat (a copy)."""
        block, token = divmod(slot, self.spec.tokens)
        return self.truth[plane][layer][block, token].reshape(-1).clone()

    def put(self, plane: int, layer: int, slot: int, value: torch.Tensor) -> None:
        block, token = divmod(slot, self.spec.tokens)
        target = self.truth[plane][layer][block, token]
        target.copy_(value.reshape(target.shape))

    def twin(self) -> EngineCache:
        """The same cache on a copy of the buffer."""
        return build(self.spec, self.raw.clone())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: NaNs compare equal to themselves."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


# Physical orders of vLLM 0.32's [L, B, H, N, C].
FUSED = {
    "LBNHC": "lbnhc",
    "LBHNC": "lbhnc",
    "LHBNC": "lhbnc",
    "BLHNC": "blhnc",
    "BLNHC": "blnhc",
    "BHLNC": "bhlnc",
}
# Older vLLM: the shape handed over, and the order in memory where that differs.
SPLIT = {
    "2,NB,BS,NH,HS": ("kbnhd", "kbnhd", "NHD"),
    "NB,2,BS,NH,HS": ("bknhd", "bknhd", "NHD"),
    "2,NB,BS,NH,HS strided HND": ("kbnhd", "kbhnd", "HND"),
    "NB,2,BS,NH,HS strided HND": ("bknhd", "bkhnd", "HND"),
    "2,NB,NH,BS,HS": ("kbhnd", "kbhnd", "HND"),
    "NB,2,NH,BS,HS": ("bkhnd", "bkhnd", "HND"),
}
PAIR = {"(K,V) NHD": ("bnhd", "bnhd", "NHD"), "(K,V) HND": ("bhnd", "bhnd", "HND")}
PADDED = ("LBNHC padded", "BLHNC padded")
SCALED = ("LBNHC scales", "LBHNC scales")  # fp8 with inline scales: C is more than two heads
LATENT = ("MLA NB,BS,HS", "MLA LBHNC", "MLA BLHNC")

KINDS = (*FUSED, *PADDED, *SCALED, *SPLIT, *PAIR, *LATENT)
TOKENWISE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn)


def build(spec: Spec, raw: torch.Tensor | None = None) -> EngineCache:
    """The cache of a spec, in a new buffer or in `raw`."""
    if spec.kind in SPLIT or spec.kind in PAIR:
        return _split(spec, raw)
    if spec.kind.startswith("MLA"):
        return _latent(spec, raw)
    return _fused(spec, raw)


def _buffer(spec: Spec, elements: int, raw: torch.Tensor | None) -> torch.Tensor:
    if raw is None:
        raw = noise((elements + 2 * MARGIN,), spec.dtype).to(DEVICE)
    return raw


def _fused(spec: Spec, raw: torch.Tensor | None) -> EngineCache:
    name, _, extra = spec.kind.partition(" ")
    content = 2 * spec.dim + (8 if extra == "scales" else 0)
    sizes = {"l": spec.layers, "b": spec.blocks, "h": spec.heads, "n": spec.tokens, "c": content}
    order = FUSED[name]
    strides, step = {}, 1
    for letter in reversed(order):
        if extra == "padded" and letter == order[1]:  # the page [H, N, C] is padded
            step += 24
        strides[letter] = step
        step *= sizes[letter]
    raw = _buffer(spec, step, raw)
    axes = "lbhnc"
    whole = raw.as_strided([sizes[a] for a in axes], [strides[a] for a in axes], MARGIN)
    half = content // 2
    parts = (whole[..., :half], whole[..., half:])
    return EngineCache(
        spec,
        Geometry(hidden=spec.heads * half, kv_layout=name),
        raw,
        list(whole),
        [[part[layer].transpose(1, 2) for layer in range(spec.layers)] for part in parts],
    )


def _split(spec: Spec, raw: torch.Tensor | None) -> EngineCache:
    shape, memory, hint = (SPLIT | PAIR)[spec.kind]
    sizes = {"k": 2, "b": spec.blocks, "n": spec.tokens, "h": spec.heads, "d": spec.dim}
    elements = torch.Size([sizes[a] for a in memory]).numel()
    pair = spec.kind in PAIR
    per_layer = 2 * elements if pair else elements
    raw = _buffer(spec, spec.layers * per_layer, raw)
    engine, truth = [], [[], []]
    for layer in range(spec.layers):
        tensors = []
        for plane in range(2 if pair else 1):
            start = MARGIN + layer * per_layer + plane * elements
            physical = raw[start : start + elements].view([sizes[a] for a in memory])
            tensors.append(physical.permute([memory.index(a) for a in shape]))
        engine.append(tuple(tensors) if pair else tensors[0])
        for plane in range(2):
            tensor = tensors[plane] if pair else tensors[0].select(shape.index("k"), plane)
            rest = shape.replace("k", "")
            truth[plane].append(tensor.permute([rest.index(a) for a in "bnhd"]))
    return EngineCache(
        spec, Geometry(hidden=spec.heads * spec.dim, kv_layout=hint), raw, engine, truth
    )


def _latent(spec: Spec, raw: torch.Tensor | None) -> EngineCache:
    name = spec.kind.removeprefix("MLA ")
    size = spec.heads * spec.dim + 4  # like 576: no power of two
    order = "lbn" if name == "NB,BS,HS" else FUSED[name].replace("h", "").replace("c", "")
    sizes = {"l": spec.layers, "b": spec.blocks, "n": spec.tokens}
    strides, step = {}, size
    for letter in reversed(order):
        strides[letter] = step
        step *= sizes[letter]
    raw = _buffer(spec, step, raw)
    whole = raw.as_strided(
        (spec.layers, spec.blocks, spec.tokens, size),
        (strides["l"], strides["b"], strides["n"], 1),
        MARGIN,
    )
    three = name == "NB,BS,HS"
    engine = list(whole) if three else [layer.unsqueeze(1) for layer in whole]
    return EngineCache(
        spec,
        Geometry(hidden=size, mla=True, kv_layout=None if three else name),
        raw,
        engine,
        [[layer.unsqueeze(2) for layer in whole]],
    )


def view_of(cache: EngineCache) -> PagedView:
    """The canonical view of a cache."""
    return PagedView.from_engine(cache.engine, cache.geometry, num_layers=cache.spec.layers)
