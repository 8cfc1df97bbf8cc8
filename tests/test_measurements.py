"""The measurements move the caches that the tests compare byte by byte, only larger."""

from __future__ import annotations

import pytest
from support.caches import Spec, build

from measurements import paged

KINDS = {
    paged.NHD: "NB,2,BS,NH,HS",
    paged.HND: "NB,2,NH,BS,HS",
    paged.FUSED_NHD: "LBNHC",
    paged.FUSED_HND: "LBHNC",
    paged.LATENT: "MLA LBHNC",
}
LAYERS, HEADS, DIM, BLOCK = 2, 2, 8, 4


def layout_of(layers):
    """Shape, and strides where they matter: a dimension of one element has none."""
    return [
        [
            (size, stride if size > 1 else 0)
            for size, stride in zip(t.shape, t.stride(), strict=True)
        ]
        for t in layers
    ]


@pytest.mark.parametrize("layout", KINDS, ids=lambda layout: layout.name)
def test_a_measured_cache_lies_in_memory_as_the_tested_one(layout):
    latent = layout is paged.LATENT
    model = paged.Model("m", LAYERS, 0 if latent else HEADS, HEADS * DIM + 4 if latent else DIM)
    work = paged.Workload(model, layout, block=BLOCK, tokens=4 * BLOCK, chunk=2 * BLOCK)
    blocks = work.slots.numel() // BLOCK
    blocks += blocks // 4 + 4
    spec = Spec(KINDS[layout], layers=LAYERS, blocks=blocks, tokens=BLOCK, heads=HEADS, dim=DIM)
    cache = build(spec)
    assert layout_of(work.kvcaches) == layout_of(cache.engine)
    if not latent:  # with one head, both orders of heads and tokens are the same
        assert layout.hint == cache.geometry.kv_layout
    assert (model.hidden, model.mla) == (cache.geometry.hidden, cache.geometry.mla)


def test_every_measured_layout_is_compared():
    assert {value for value in vars(paged).values() if isinstance(value, paged.Layout)} == {*KINDS}
