"""The torch transfer on every layout, direction and dtype, against a truth of loops."""

from __future__ import annotations

import pytest
import torch
from caches import KINDS, SCALED, TOKENWISE_DTYPES, EngineCache, Spec, bits, build
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_xpu.paged_view import PagedView
from lmcache_xpu.slots import check_slots, chunk_rows
from lmcache_xpu.transfer import TorchTransfer

DTYPES = {kind: (torch.uint8,) if kind in SCALED else TOKENWISE_DTYPES for kind in KINDS}
SPECS = [Spec(kind, dtype) for kind in KINDS for dtype in DTYPES[kind]]

SLOTS = {
    "one token": [7],
    "a whole block": [8, 9, 10, 11],
    "ends inside a block": [4, 5, 6, 7, 20, 21],
    "backwards": [23, 17, 11, 5, 0],
    "some unmapped": [-1, 3, -1, -1, 22, 0],
    "all unmapped": [-1, -1, -1],
    "no tokens": [],
}


def view_of(cache: EngineCache) -> PagedView:
    return PagedView.from_engine(cache.engine, cache.geometry, num_layers=cache.spec.layers)


def gather(cache: EngineCache, slots: list[int], out: torch.Tensor, skip: int = 0) -> None:
    view = view_of(cache)
    rows = chunk_rows(view, check_slots(view, torch.tensor(slots, dtype=torch.int64)), skip)
    TorchTransfer.of(view).gather(rows, out)


def scatter(cache: EngineCache, slots: list[int], source: torch.Tensor, skip: int = 0) -> None:
    view = view_of(cache)
    rows = chunk_rows(view, check_slots(view, torch.tensor(slots, dtype=torch.int64)), skip)
    TorchTransfer.of(view).scatter(rows, source)


def expected_gather(cache: EngineCache, slots: list[int], out: torch.Tensor, skip: int = 0):
    wanted = out.clone()
    for plane in range(cache.planes):
        for layer in range(cache.spec.layers):
            for token, slot in enumerate(slots):
                if slot >= 0 and token >= skip:
                    wanted[plane, layer, token] = cache.token(plane, layer, slot)
    return wanted


def expected_scatter(cache: EngineCache, slots: list[int], source: torch.Tensor, skip: int = 0):
    wanted = cache.twin()
    for plane in range(cache.planes):
        for layer in range(cache.spec.layers):
            for token, slot in enumerate(slots):
                if slot >= 0 and token >= skip:
                    wanted.put(plane, layer, slot, source[plane, layer, token])
    return wanted.raw


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gather_copies_the_mapped_tokens_and_leaves_the_rest(spec: Spec, name: str):
    cache = build(spec)
    before = cache.raw.clone()
    out = cache.host(len(SLOTS[name]))
    wanted = expected_gather(cache, SLOTS[name], out)
    gather(cache, SLOTS[name], out)
    assert torch.equal(bits(out), bits(wanted))
    assert torch.equal(bits(cache.raw), bits(before))


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scatter_writes_the_mapped_slots_and_nothing_else(spec: Spec, name: str):
    cache = build(spec)
    source = cache.host(len(SLOTS[name]))
    before = source.clone()
    wanted = expected_scatter(cache, SLOTS[name], source)
    scatter(cache, SLOTS[name], source)
    assert torch.equal(bits(cache.raw), bits(wanted))
    assert torch.equal(bits(source), bits(before))


@pytest.mark.parametrize("skip", [1, 3, 6])
@pytest.mark.parametrize("kind", ["LBNHC", "2,NB,NH,BS,HS", "MLA LBHNC"])
def test_skipped_tokens_are_left_alone(kind: str, skip: int):
    slots = [4, 5, -1, 20, 21, 1]
    cache = build(Spec(kind))
    source = cache.host(len(slots))
    wanted = expected_scatter(cache, slots, source, skip)
    scatter(cache, slots, source, skip)
    assert torch.equal(bits(cache.raw), bits(wanted))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Spec, list[int], int]:
    kind = draw(st.sampled_from(KINDS))
    spec = Spec(
        kind,
        draw(st.sampled_from(DTYPES[kind])),
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.integers(3, 7)),  # two blocks would look like keys and values
        tokens=draw(st.sampled_from((1, 2, 3, 16))),
        heads=draw(st.sampled_from((1, 2, 5))),
        dim=draw(st.sampled_from((2, 4, 6, 64))),
    )
    places = st.integers(0, spec.blocks * spec.tokens - 1)
    slots = draw(st.lists(places, unique=True, max_size=24))
    holes = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    slots = [-1 if hole else slot for slot, hole in zip(slots, holes, strict=True)]
    return spec, slots, draw(st.integers(0, len(slots)))


@settings(max_examples=150, deadline=None)
@given(situations())
def test_a_round_trip_is_the_identity_on_mapped_slots(situation: tuple[Spec, list[int], int]):
    spec, slots, skip = situation
    cache = build(spec)
    out = cache.host(len(slots))
    gather(cache, slots, out)
    other = build(spec)
    wanted = expected_scatter(other, slots, out, skip)
    scatter(other, slots, out, skip)
    assert torch.equal(bits(other.raw), bits(wanted))
    back = out.clone()
    gather(other, slots, back, skip)
    assert torch.equal(bits(back), bits(out))


def test_the_window_is_a_view_of_the_engine_s_memory():
    cache = build(Spec("BHLNC"))
    transfer = TorchTransfer.of(view_of(cache))
    pointers = {
        window.untyped_storage().data_ptr() for layer in transfer.windows for window in layer
    }
    assert pointers == {cache.raw.untyped_storage().data_ptr()}
