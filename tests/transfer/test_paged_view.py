"""The canonical view: no copy, the same for every layout, and nothing that can't be expressed."""

from __future__ import annotations

import pytest
import torch
from support.caches import KINDS, LATENT, Spec, bits, build

from lmcache_xpu.errors import LayoutError
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import PagedView, pages_of


def view_of(cache, **options) -> PagedView:
    return PagedView.from_engine(
        cache.engine, cache.geometry, num_layers=cache.spec.layers, **options
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_view_is_the_engine_s_own_memory(kind: str):
    cache = build(Spec(kind, torch.uint8))
    view = view_of(cache)
    assert (view.layers, view.planes) == (3, 1 if kind in LATENT else 2)
    assert view.row_bytes == cache.geometry.hidden
    assert (view.shape[:2], view.tokens_per_row) == ((6, 4), 1)
    for plane in range(view.planes):
        for layer in range(view.layers):
            mine, truth = view.tensors[layer][plane], cache.truth[plane][layer]
            assert mine.data_ptr() == truth.data_ptr()
            assert torch.equal(mine, truth)


@pytest.mark.parametrize("kind", ["LBHNC", "LBNHC", "BLHNC"])
def test_opaque_blocks_are_rows_of_all_their_bytes(kind: str):
    cache = build(Spec(kind))
    view = view_of(cache, opaque_blocks=True)
    assert view.shape == (6, 1, 1, 4 * 2 * 16)
    assert (view.planes, view.tokens_per_row, view.shape[:2]) == (1, 4, (6, 1))
    for layer, tensor in enumerate(cache.engine):
        start = tensor.storage_offset()
        for block in range(6):
            at = start + block * tensor.stride(0)
            whole = view.tensors[layer][0][block].flatten()
            assert torch.equal(bits(whole), bits(cache.raw[at : at + 128]))


@pytest.mark.parametrize("kind", ["LHBNC", "BHLNC", "2,NB,BS,NH,HS", "(K,V) NHD", "MLA LBHNC"])
def test_opaque_blocks_that_do_not_lie_in_one_piece_are_refused(kind: str):
    with pytest.raises(LayoutError, match="opaque blocks"):
        view_of(build(Spec(kind)), opaque_blocks=True)


def test_layers_must_match():
    cache = build(Spec("LBHNC"))
    with pytest.raises(LayoutError, match="2 layers of KV cache"):
        PagedView.from_engine(cache.engine[:2], cache.geometry, num_layers=3)
    with pytest.raises(LayoutError, match="no layers"):
        PagedView.from_engine([], cache.geometry, num_layers=0)
    other = [*cache.engine[:2], torch.empty(6, 2, 8, 16, dtype=torch.bfloat16)]
    with pytest.raises(LayoutError, match=r"layer 2 .*\[6, 8, 2, 8\]"):
        PagedView.from_engine(other, cache.geometry, num_layers=3)
    typed = [*cache.engine[:2], torch.empty(6, 2, 4, 16)]
    with pytest.raises(LayoutError, match=r"layer 2 .*float32"):
        PagedView.from_engine(typed, cache.geometry, num_layers=3)


def test_a_head_that_is_not_contiguous_is_refused():
    layer = torch.empty(6, 2, 16, 4).transpose(2, 3)
    with pytest.raises(LayoutError, match="stride 4"):
        PagedView.from_engine([layer], Geometry(hidden=16), num_layers=1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.isalpha()])
def test_pages_are_the_bytes_of_whole_blocks_whatever_their_order(kind: str):
    cache = build(Spec(kind))
    blocks = cache.engine[0].shape[0]
    for number, layer in enumerate(cache.engine):
        before = bits(layer).clone()
        runs = pages_of(layer, blocks)
        view = PagedView.of_pages(runs, 4)
        assert sum(run.shape[1] for run in runs) == layer[0].numel() * layer.element_size()
        assert (view.planes, view.tokens_per_row, view.shape[:2]) == (1, 4, (blocks, 1))
        for run in runs:
            run[number + 1] = 0
        kept = [block for block in range(blocks) if block != number + 1]
        assert not layer[number + 1].any()
        assert torch.equal(bits(layer)[kept], before[kept])


def test_parts_of_blocks_make_one_page_and_states_share_it():
    small = torch.arange(6 * 8, dtype=torch.int16).view(12, 4)  # each block is two of these
    [page] = pages_of(small, 6)
    assert page.shape == (6, 16)
    assert torch.equal(page.view(torch.int16)[2], small[4:6].flatten())
    memory = torch.arange(6 * 8, dtype=torch.float32)
    states = [memory.as_strided((6, 3), (8, 1)), memory.as_strided((6, 4), (8, 1), 3)]
    [page] = pages_of(states, 6)
    assert torch.equal(page.view(torch.float32), memory.view(6, 8))


def test_a_first_dimension_that_counts_no_blocks_is_refused():
    with pytest.raises(LayoutError, match="counts blocks"):
        pages_of(torch.zeros(7, 4), 6)
    with pytest.raises(LayoutError, match="no layers"):
        PagedView.of_pages([], 4)
