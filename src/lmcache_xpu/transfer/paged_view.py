"""The paged view: every engine's KV cache as `[layer][plane, block, row, head, dim]`.

A *row* is the least that is copied on its own: one token, or a whole block where the engine packs
the tokens of a block together. Layouts differ in strides alone, so nothing after this file asks
which engine or layout it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_xpu.errors import LayoutError
from lmcache_xpu.transfer.layout import Geometry, find_axes

EngineLayer = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedView:
    """A view of the engine's KV cache; holds no memory of its own.

    Args:
        tensors: `[layer][plane]`, each `[blocks, rows, heads, dim]` on the engine's memory, all
            with the same shape, strides, dtype and device; the last stride is 1.
        tokens_per_row: 1, or the tokens of a block where blocks are opaque.

    Raises:
        LayoutError: tensors that differ.
    """

    tensors: tuple[tuple[torch.Tensor, ...], ...]
    tokens_per_row: int = 1

    @classmethod
    def from_engine(
        cls,
        kv_caches: Sequence[EngineLayer],
        geometry: Geometry,
        *,
        num_layers: int,
        opaque_blocks: bool = False,
    ) -> PagedView:
        """Read the engine's layers; nothing is copied, and no memory touched.

        Args:
            kv_caches: one tensor or one (K, V) pair per layer, in the engine's layer order.
            geometry: what a token's KV must look like.
            num_layers: how many layers LMCache's host format has.
            opaque_blocks: the engine packs the tokens of a block in an order of its own, so
                that only whole blocks can be copied (vLLM's CPU attention).

        Raises:
            LayoutError: the layers can't be read, have two readings, or differ.
        """
        if len(kv_caches) != num_layers:
            raise LayoutError(
                f"{len(kv_caches)} layers of KV cache",
                f"{num_layers}, the model's layers as LMCache counts them",
            )
        if num_layers == 0:
            raise LayoutError("no layers", "at least one layer of KV cache")
        first = kv_caches[0]
        pair = not isinstance(first, torch.Tensor)
        head = first if isinstance(first, torch.Tensor) else first[0]
        axes = find_axes(head.shape, head.stride(), geometry, pair=pair)
        split = _opaque_planes if opaque_blocks else _planes
        return cls(
            tensors=tuple(split(layer, axes, geometry.planes) for layer in kv_caches),
            tokens_per_row=head.shape[axes.index("n")] if opaque_blocks else 1,
        )

    @classmethod
    def of_pages(cls, pages: Sequence[torch.Tensor], block_tokens: int) -> PagedView:
        """Read layers by the places of their blocks alone.

        Args:
            pages: `[blocks, bytes of a block]` uint8 per layer (see `pages_of`), all alike.
            block_tokens: tokens of a block, as the engine numbers blocks.

        Raises:
            LayoutError: no layers, or layers that differ.
        """
        if not pages:
            raise LayoutError("no layers", "at least one layer of KV cache")
        tensors = tuple((page[:, None, None, :],) for page in pages)
        return cls(tensors=tensors, tokens_per_row=block_tokens)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.tensors)

    @property
    def planes(self) -> int:
        """Number of planes: 2 for keys and values; 1 for MLA's latent and for opaque blocks."""
        return len(self.tensors[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of blocks, rows per block, heads and dim, the same in every layer and plane."""
        return self.tensors[0][0].shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, in the order of `shape`."""
        return self.tensors[0][0].stride()

    @property
    def row_size(self) -> int:
        """Elements of one row in one layer and plane."""
        return self.shape[2] * self.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """The engine's dtype; bytes are moved, never converted."""
        return self.tensors[0][0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the engine's memory."""
        return self.tensors[0][0].device

    def __post_init__(self) -> None:
        reference = self.tensors[0][0]
        expected = _described(reference)
        for index, layer in enumerate(self.tensors):
            for tensor in layer:
                if _described(tensor) != expected:
                    raise LayoutError(
                        f"layer {index} with {_described(tensor)}",
                        f"{expected} as in layer 0",
                        "Models whose layers have different KV shapes are not supported.",
                    )
        if reference.shape[-1] > 1 and reference.stride(-1) != 1:
            raise LayoutError(
                f"a head dimension with stride {reference.stride(-1)}", "stride 1, contiguous heads"
            )


def pages_of(layer: EngineLayer, blocks: int) -> list[torch.Tensor]:
    """Return a layer's blocks as bytes, `[blocks, bytes]` uint8; nothing is copied.

    Several such tensors where a block's bytes do not lie side by side, in one order for one layout.
    A layer of several tensors, such as a recurrent layer's states, has all of them in one page: the
    first begins with the page, and its blocks are a page apart.

    Args:
        layer: the first dimension of its tensor counts blocks, or equal parts of blocks.
        blocks: of the engine.

    Raises:
        LayoutError: another first dimension.
    """
    tensor = layer if isinstance(layer, torch.Tensor) else layer[0]
    parts, rest = divmod(tensor.shape[0], max(blocks, 1))
    if rest or not parts:
        raise LayoutError(
            f"a KV cache of shape {list(tensor.shape)} for {blocks} blocks",
            "a first dimension that counts blocks, or equal parts of them",
        )
    size = tensor.element_size()
    page = tensor.stride(0) * size * parts
    if not isinstance(layer, torch.Tensor):
        return [_bytes_at(tensor, int(tensor.storage_offset()) * size, blocks, page, page)]
    run, outer = size, list[tuple[int, int]]()
    for step, extent in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if extent > 1 and step * size == run and not outer:
            run *= extent
        elif extent > 1:
            outer.append((step * size, extent))
    if parts > 1:
        if outer or run * parts != page:
            outer.append((tensor.stride(0) * size, parts))
        else:
            run = page
    places = [0]
    for step, extent in reversed(outer):
        places = [place + step * index for place in places for index in range(extent)]
    start = int(tensor.storage_offset()) * size
    return [_bytes_at(tensor, start + place, blocks, page, run) for place in places]


def _bytes_at(tensor: torch.Tensor, start: int, blocks: int, step: int, size: int) -> torch.Tensor:
    """Return bytes of a tensor's memory, `size` of them every `step`."""
    with torch.inference_mode(False):  # what is kept may be written from either mode
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage(), start, (blocks, size), (step, 1))
    return memory


def _described(tensor: torch.Tensor) -> str:
    shape, strides = list(tensor.shape), list(tensor.stride())
    return f"shape {shape}, strides {strides}, {tensor.dtype} on {tensor.device}"


def _planes(layer: EngineLayer, axes: str, count: int) -> tuple[torch.Tensor, ...]:
    """Return a layer's planes as `[block, row, head, dim]`."""
    if not isinstance(layer, torch.Tensor):
        return tuple(_ordered(plane, axes) for plane in layer)
    if "k" in axes:
        axis = axes.index("k")
        return tuple(_ordered(layer.select(axis, k), axes.replace("k", "")) for k in range(count))
    # With inline scales or unequal key and value sizes two planes are not keys and values. A copy
    # only needs both directions to cut at the same place.
    return _ordered(layer, axes).chunk(count, dim=-1)


def _ordered(tensor: torch.Tensor, axes: str) -> torch.Tensor:
    if axes == "bnd":  # older vLLM's MLA names no head
        return tensor.unsqueeze(2)
    last = "c" if "c" in axes else "d"
    return tensor.permute([axes.index(letter) for letter in ("b", "n", "h", last)])


def _opaque_planes(layer: EngineLayer, axes: str, count: int) -> tuple[torch.Tensor, ...]:
    """Return a layer's blocks as rows of one plane, `[block, 1, 1, elements of a block]`."""
    if not isinstance(layer, torch.Tensor) or axes != "bhnc" or count != 2:
        raise LayoutError(
            f"opaque blocks in a KV cache read as {axes!r} with {count} plane(s)",
            "vLLM's [B, H, N, C] with keys and values in C",
        )
    blocks, inside = layer.shape[0], layer.shape[1:]
    size = 1
    for stride, extent in sorted(zip(layer.stride()[1:], inside, strict=True)):
        if extent > 1 and stride != size:
            raise LayoutError(
                f"opaque blocks of shape {list(inside)} with strides {list(layer.stride()[1:])}",
                "blocks whose bytes lie side by side, because only whole blocks can be copied",
            )
        size *= extent
    return (layer.as_strided((blocks, 1, 1, size), (layer.stride(0), size, size, 1)),)
