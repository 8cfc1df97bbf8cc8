"""The layouts of engines' KV caches, and which dimension of a layer's tensor means what.

One letter names each dimension, in the tensor's own (logical) order:

    b  block of the paged KV cache        h  KV head
    n  token inside the block             d  head dimension
    k  key (0) or value (1)               c  content: key and value side by side, or MLA's latent

    bhnc    vLLM 0.26 and newer (2 or 1 planes in c, any strides), MLA with h = 1
    kbnhd   older vLLM, FlashAttention          bknhd   older vLLM, Triton and newer FlashAttention
    kbhnd   the same, heads before tokens       bkhnd   the same, heads before tokens
    bnd     older vLLM, MLA
    bnhd    one of a (key, value) pair          bhnd    the same, heads before tokens

Sizes rule out most readings. The layout that the engine names (`NHD`, `HND`, `LBNHC`, ...) decides
among the others: it says whether tokens (N) or heads (H) are the outer dimension in memory, and the
strides say which of two equal dimensions that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_xpu.errors import LayoutError

FUSED = ("bhnc",)
SPLIT = ("kbnhd", "bknhd", "kbhnd", "bkhnd")
LATENT = ("bhnc", "bnd")
PAIR = ("bnhd", "bhnd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What one token's KV must look like, whatever the layout."""

    hidden: int  # elements of one token in one plane: heads x head size (MLA: the latent's size)
    mla: bool = False  # one latent plane instead of keys and values
    # The memory order that the engine names (NHD, HND, or a layout of vLLM such as LBNHC), if any.
    kv_layout: str | None = None

    def __post_init__(self) -> None:
        if self.kv_layout is not None and not {"N", "H"} <= set(self.kv_layout.upper()):
            raise LayoutError(
                f"layout hint {self.kv_layout!r}",
                "NHD, HND, or a vLLM layout name such as LBNHC that orders N and H",
            )

    @property
    def planes(self) -> int:
        """Planes in LMCache's host format: keys and values, or one latent."""
        return 1 if self.mla else 2


def find_axes(
    shape: Sequence[int], stride: Sequence[int], geometry: Geometry, *, pair: bool = False
) -> str:
    """Return the letters of the dimensions of a layer's tensor, or of each of a (K, V) pair.

    Raises:
        LayoutError: no reading fits, or more than one does.
    """
    readings = PAIR if pair else LATENT if geometry.mla else FUSED + SPLIT
    fits = [axes for axes in readings if _sizes_fit(axes, shape, geometry)]
    if name := (geometry.kv_layout or "").upper():
        outside = name.index("N") < name.index("H")  # tokens enclose heads
        fits = [axes for axes in fits if _order_fits(axes, shape, stride, outside)]
    if len({_reading(axes, shape, stride) for axes in fits}) == 1:
        return fits[0]
    form = "a (K, V) pair of tensors" if pair else "a tensor"
    cache = (
        f"{form} of shape {list(shape)} and strides {list(stride)} per layer, with "
        f"{geometry.hidden} elements per token {'(MLA)' if geometry.mla else 'and plane'} and "
        f"layout hint {geometry.kv_layout!r}"
    )
    if not fits:
        raise LayoutError(
            cache,
            "a KV cache that can be read; supported are [B, H, N, C] (vLLM 0.26 and newer, MLA "
            "with H = 1), [2, NB, BS, NH, HS], [NB, 2, BS, NH, HS], their forms with NH before BS, "
            "[NB, BS, HS] (MLA), and (K, V) pairs of [NB, BS, NH, HS] or [NB, NH, BS, HS]",
        )
    raise LayoutError(
        cache,
        f"exactly one reading, but {' and '.join(fits)} both fit",
        "Pass the engine's layout as layout_hints={'kv_layout': ...}, or a cache with more "
        "than two blocks.",
    )


def _sizes_fit(axes: str, shape: Sequence[int], geometry: Geometry) -> bool:
    if len(axes) != len(shape):
        return False
    size = dict(zip(axes, shape, strict=True))
    if size.get("k", 2) != 2:
        return False
    if geometry.mla:
        return size.get("h", 1) == 1 and size.get("c", size.get("d")) == geometry.hidden
    content = size["c"] if "c" in size else 2 * size["d"]
    return content % 2 == 0 and size["h"] * content == 2 * geometry.hidden


def _reading(
    axes: str, shape: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[str, int, int], ...]:
    """Return what a reading means in memory; letters of dimensions of size 1 may change places."""
    dimensions = zip(axes, shape, stride, strict=True)
    return tuple(sorted((a, size, step if size > 1 else 0) for a, size, step in dimensions))


def _order_fits(axes: str, shape: Sequence[int], stride: Sequence[int], outside: bool) -> bool:
    n, h = axes.index("n"), axes.find("h")
    if h < 0 or 1 in (shape[n], shape[h]):  # the stride of a dimension of size 1 says nothing
        return True
    return (stride[n] > stride[h]) == outside
