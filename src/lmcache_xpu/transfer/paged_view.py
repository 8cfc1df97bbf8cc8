"""The paged view: every engine's KV cache as `[layer][plane, block, row, head, dim]`.

A *row* is the least that is copied on its own: one token, or a whole block where the engine packs
the tokens of a block together. Layouts differ in strides alone, so nothing after this file asks
which engine or layout it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_xpu.errors import LayoutError
from lmcache_xpu.transfer.layout import Geometry, find_axes

EngineLayer = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]


class PagedView:
    """A view of the engine's KV cache; holds no memory of its own.

    Args:
        tensors: `[layer][plane]`, each `[blocks, rows, heads, dim]` on the engine's memory; the
            last stride is 1.
        tokens_per_row: the tokens of a block where blocks are opaque.

    Raises:
        LayoutError: no tensors, or tensors that differ in shape, strides, dtype or device.
    """

    def __init__(
        self, tensors: tuple[tuple[torch.Tensor, ...], ...], tokens_per_row: int = 1
    ) -> None:
        if not tensors:
            raise LayoutError("no layers", "at least one layer of KV cache")
        first = tensors[0][0]
        expected = _described(first)
        for index, layer in enumerate(tensors):
            for tensor in layer:
                if _described(tensor) != expected:
                    raise LayoutError(
                        f"layer {index} with {_described(tensor)}",
                        f"{expected} as in layer 0",
                        "Models whose layers have different KV shapes are not supported.",
                    )
        if first.shape[-1] > 1 and first.stride(-1) != 1:
            raise LayoutError(
                f"a head dimension with stride {first.stride(-1)}", "stride 1, contiguous heads"
            )
        self.tensors, self.tokens_per_row = tensors, tokens_per_row
        self.layers = len(tensors)
        self.planes = len(tensors[0])  # 2 for keys and values; 1 for MLA and for opaque blocks
        self.shape = first.shape
        # In elements. That of a dimension of size 1 is never used, and may be anything: 0.
        extents = zip(first.stride(), first.shape, strict=True)
        self.strides = tuple(step if extent > 1 else 0 for step, extent in extents)
        self.row_bytes = first.shape[2] * first.shape[3] * first.itemsize  # of a layer and plane
        self.dtype = first.dtype  # the engine's
        self.device = first.device

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
        if not num_layers:
            return cls(tensors=())
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
        """Read layers by the places of their blocks alone; `pages` as of `pages_of`, all alike."""
        tensors = tuple((page[:, None, None, :],) for page in pages)
        return cls(tensors=tensors, tokens_per_row=block_tokens)


def pages_of(layer: EngineLayer, blocks: int) -> list[torch.Tensor]:
    """Return a layer's blocks as bytes, `[blocks, bytes]` uint8; nothing is copied.

    Several such tensors where a block's bytes do not lie side by side, in one order for one layout.
    A layer of several tensors, such as a recurrent layer's states, has all of them in one page: the
    first begins with the page, and its blocks are a page apart.

    Raises:
        LayoutError: the first dimension counts neither blocks nor equal parts of them.
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
        return [bytes_at(tensor, int(tensor.storage_offset()) * size, blocks, page, page)]
    run, outer = size, list[tuple[int, int]]()
    inside = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    for step, extent in [*inside, (tensor.stride(0), parts)]:
        if extent > 1 and step * size == run and not outer:
            run *= extent
        elif extent > 1:
            outer.append((step * size, extent))
    places = [0]
    for step, extent in reversed(outer):
        places = [place + step * index for place in places for index in range(extent)]
    start = int(tensor.storage_offset()) * size
    return [bytes_at(tensor, start + place, blocks, page, run) for place in places]


def bytes_at(tensor: torch.Tensor, start: int, blocks: int, step: int, size: int) -> torch.Tensor:
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
    if isinstance(layer, torch.Tensor) and axes == "bhnc" and count == 2:
        pages = pages_of(layer, layer.shape[0])
        if len(pages) == 1:
            return (pages[0].view(layer.dtype)[:, None, None],)
        axes = f"{axes} of strides {list(layer.stride())}"
    raise LayoutError(
        f"opaque blocks in a KV cache read as {axes} with {count} plane(s)",
        "vLLM's [B, H, N, C] with keys and values in C, and the bytes of a block side by side",
    )
