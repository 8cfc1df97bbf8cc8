"""Reading what engines hand over: one reading, or an error that says why not."""

from __future__ import annotations

import pytest
import torch
from support.caches import KINDS, Spec, build

from lmcache_xpu.errors import LayoutError
from lmcache_xpu.transfer.layout import Geometry, find_axes


def axes(shape, hidden, kv_layout=None, *, mla=False, pair=False, stride=None):
    stride = stride or torch.empty(shape, device="meta").stride()
    return find_axes(
        shape, stride, Geometry(hidden=hidden, mla=mla, kv_layout=kv_layout), pair=pair
    )


@pytest.mark.parametrize(
    ("shape", "hidden", "hint", "wanted"),
    [
        ((9, 8, 16, 256), 1024, None, "bhnc"),
        ((9, 8, 16, 256), 1024, "LBHNC", "bhnc"),
        ((2, 9, 16, 8, 128), 1024, None, "kbnhd"),
        ((9, 2, 16, 8, 128), 1024, None, "bknhd"),
        ((2, 9, 8, 16, 128), 1024, None, "kbhnd"),
        ((9, 2, 8, 16, 128), 1024, None, "bkhnd"),
        # As many tokens as heads: only the engine's word and the strides tell.
        ((2, 9, 8, 8, 128), 1024, "NHD", "kbnhd"),
        ((2, 9, 8, 8, 128), 1024, "HND", "kbhnd"),
        # One head: both readings of the strides are the same memory, sizes decide.
        ((2, 9, 16, 1, 128), 128, "HND", "kbnhd"),
    ],
)
def test_sizes_hints_and_strides_decide(shape, hidden, hint, wanted):
    assert axes(shape, hidden, hint) == wanted


def test_strides_turn_the_hint_around():
    """A logical [.., BS, NH, ..] tensor with heads outside in memory is HND, not NHD."""
    shape, stride = (2, 9, 8, 8, 128), (9 * 8192, 8192, 128, 1024, 1)
    assert axes(shape, 1024, "HND", stride=stride) == "kbnhd"
    assert axes(shape, 1024, "NHD", stride=stride) == "kbhnd"


def test_mla_and_pairs():
    assert axes((9, 16, 576), 576, mla=True) == "bnd"
    assert axes((9, 1, 16, 576), 576, "LBNHC", mla=True) == "bhnc"
    assert axes((9, 16, 8, 128), 1024, pair=True) == "bnhd"
    assert axes((9, 8, 16, 128), 1024, pair=True) == "bhnd"


@pytest.mark.parametrize(
    ("shape", "hidden", "hint", "options", "says"),
    [
        ((2, 9, 8, 8, 128), 1024, None, {}, "kbnhd and kbhnd both fit"),
        ((2, 2, 16, 8, 128), 1024, None, {}, "kbnhd and bknhd both fit"),
        ((9, 8, 8, 128), 1024, None, {"pair": True}, "both fit"),
        ((9, 8, 16, 100), 1024, None, {}, "a KV cache that can be read"),
        ((9, 8, 16, 256), 1024, "LBNHC", {}, "layout hint 'LBNHC'"),  # strides say LBHNC
        ((9, 8, 16), 1024, None, {}, "[9, 8, 16]"),
        ((9, 2, 16, 576), 576, None, {"mla": True}, "(MLA)"),
        ((9, 16, 512), 576, None, {"mla": True}, "576 elements"),
        ((3, 9, 16, 8, 128), 1024, None, {}, "supported are"),
        ((9, 8, 16, 256, 1, 1), 1024, None, {}, "supported are"),
    ],
)
def test_everything_else_is_an_error_that_names_shape_and_support(
    shape, hidden, hint, options, says
):
    with pytest.raises(LayoutError) as error:
        axes(shape, hidden, hint, **options)
    assert says in str(error.value)
    assert str(list(shape)) in str(error.value)


def test_an_unknown_hint_is_an_error():
    with pytest.raises(LayoutError, match="layout hint 'rows'"):
        Geometry(hidden=8, kv_layout="rows")


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_cache_is_read_with_its_hint(kind):
    cache = build(Spec(kind, torch.uint8))
    layer = cache.engine[0]
    pair = isinstance(layer, tuple)
    first = layer[0] if pair else layer
    letters = find_axes(first.shape, first.stride(), cache.geometry, pair=pair)
    assert letters.index("b") == first.shape.index(6)  # the only size of 6 in these caches
