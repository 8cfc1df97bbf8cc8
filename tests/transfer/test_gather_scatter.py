"""Gather and scatter on every layout, direction and dtype, against a truth of loops.

The torch transfer runs on the accelerator if there is one, else on CPU; the Triton kernel there
too, else in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import caches
from support.caches import KINDS, SCALED, TOKENWISE_DTYPES, EngineCache, Spec, bits, build, view_of
from support.intel import INTEL
from support.intel import machine as machine  # a fixture
from support.kernels import TritonTransfer, interpreter  # noqa: F401  # a fixture

from lmcache_xpu.transfer.gather_scatter import TorchTransfer
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostMemory
from lmcache_xpu.transfer.slots import Rows, request_rows

KERNEL_DTYPES = (torch.bfloat16, torch.uint8)  # the interpreter is slow; words are two of four
DTYPES = {kind: (torch.uint8,) if kind in SCALED else TOKENWISE_DTYPES for kind in KINDS}
CASES = [
    pytest.param(None, transfer, Spec(kind, dtype), id=f"{name}-{Spec(kind, dtype)}")
    for name, transfer in (("torch", TorchTransfer), ("triton", TritonTransfer))
    for kind in KINDS
    for dtype in DTYPES[kind]
    if transfer is TorchTransfer or dtype in KERNEL_DTYPES
]
UNREACHED, *_, REACHED = INTEL  # whether kernels reach the host
CASES += [
    pytest.param(UNREACHED, transfer, Spec(kind), id=f"{name}-{kind} on xpu")
    for name, transfer in (("torch", TorchTransfer), ("triton", TritonTransfer))
    for kind in ("LBNHC", "MLA LBNHC")
]
ALL = pytest.mark.parametrize(("machine", "transfer", "spec"), CASES, indirect=["machine"])

SLOTS = {
    "one token": [7],
    "a whole block": [8, 9, 10, 11],
    "ends inside a block": [4, 5, 6, 7, 20, 21],
    "backwards": [23, 17, 11, 5, 0],
    "some unmapped": [-1, 3, -1, -1, 22, 0],
    "all unmapped": [-1, -1, -1],
    "no tokens": [],
}


def rows_of(view: PagedView, slots: list[int], skip: int = 0) -> Rows:
    mapping = torch.tensor(slots, dtype=torch.int64)
    return request_rows(view, mapping, [(0, len(slots))], skip).chunks(0, 1)


def prepare(
    cache: EngineCache, transfer: type[TorchTransfer | TritonTransfer], slots: list[int], skip: int
) -> tuple[TorchTransfer | TritonTransfer, Rows]:
    view = view_of(cache)
    return transfer.of(view), rows_of(view, slots, skip)


def gather(transfer, cache: EngineCache, slots: list[int], out: torch.Tensor, skip: int = 0):
    mover, rows = prepare(cache, transfer, slots, skip)
    there = out.to(caches.DEVICE)
    mover.gather(rows, there[None])
    out.copy_(there)


def scatter(transfer, cache: EngineCache, slots: list[int], source: torch.Tensor, skip: int = 0):
    mover, rows = prepare(cache, transfer, slots, skip)
    mover.scatter(rows, source.to(caches.DEVICE)[None])


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
@ALL
def test_gather_copies_the_mapped_tokens_and_leaves_the_rest(transfer, spec: Spec, name: str):
    cache = build(spec)
    before = cache.raw.clone()
    out = cache.host(len(SLOTS[name]))
    wanted = expected_gather(cache, SLOTS[name], out)
    gather(transfer, cache, SLOTS[name], out)
    assert torch.equal(bits(out), bits(wanted))
    assert torch.equal(bits(cache.raw), bits(before))


@pytest.mark.parametrize("name", SLOTS)
@ALL
def test_scatter_writes_the_mapped_slots_and_nothing_else(transfer, spec: Spec, name: str):
    cache = build(spec)
    source = cache.host(len(SLOTS[name]))
    before = source.clone()
    wanted = expected_scatter(cache, SLOTS[name], source)
    scatter(transfer, cache, SLOTS[name], source)
    assert torch.equal(bits(cache.raw), bits(wanted))
    assert torch.equal(bits(source), bits(before))


BOTH = pytest.mark.parametrize("transfer", [TorchTransfer, TritonTransfer])


@BOTH
@pytest.mark.parametrize("skip", [1, 3, 6])
@pytest.mark.parametrize("kind", ["LBNHC", "2,NB,NH,BS,HS", "MLA LBHNC"])
def test_skipped_tokens_are_left_alone(transfer, kind: str, skip: int):
    slots = [4, 5, -1, 20, 21, 1]
    cache = build(Spec(kind))
    source = cache.host(len(slots))
    wanted = expected_scatter(cache, slots, source, skip)
    scatter(transfer, cache, slots, source, skip)
    assert torch.equal(bits(cache.raw), bits(wanted))


@BOTH
@pytest.mark.parametrize("slots", [[4, 5, 20], [-1, 5, 20]])
def test_some_layers_of_a_chunk_whose_tokens_lie_between(transfer, slots: list[int]):
    """As a layerwise transfer needs: `[tokens, planes, hidden]` of one layer."""
    cache = build(Spec("BLHNC"))
    mover, rows = prepare(cache, transfer, slots, 0)
    whole = cache.host(3)
    wanted = expected_gather(cache, slots, whole)
    for layer in range(3):
        chunk = whole[:, layer].transpose(0, 1).contiguous().to(caches.DEVICE)
        mover.gather(rows, chunk.permute(1, 0, 2)[None, :, None], layer)
        assert torch.equal(bits(chunk.transpose(0, 1)), bits(wanted[:, layer]))
    source = cache.host(3)
    truth = expected_scatter(cache, slots, source)
    for layer in range(3):
        chunk = source[:, layer].transpose(0, 1).contiguous().to(caches.DEVICE)
        mover.scatter(rows, chunk.permute(1, 0, 2)[None, :, None], layer)
    assert torch.equal(bits(cache.raw), bits(truth))


@pytest.mark.parametrize("slots", [[4, 5, 20, 1, 0, 9, 13], [-1, 5, 20, -1, 0, 9, -1]])
@pytest.mark.parametrize(
    ("machine", "kind"),
    [(None, "BLHNC"), (None, "NB,2,BS,NH,HS"), (None, "MLA LBNHC"), (REACHED, "LBNHC")],
    indirect=["machine"],
)
@pytest.mark.parametrize("offset", [0, 64, 72])
def test_chunks_in_many_places_in_one_launch(offset: int, kind: str, slots: list[int]):
    """Host memory addressed by the kernel: pieces of 3, 3 and 1 tokens of one layer."""
    cache = build(Spec(kind))
    view = view_of(cache)
    mover, rows = TritonTransfer.of(view), rows_of(view, slots)
    sizes, hidden = (3, 3, 1), cache.geometry.hidden

    def pieces(whole: torch.Tensor, layer: int) -> list[torch.Tensor]:
        tokens = whole[:, layer].transpose(0, 1)  # [tokens, planes, hidden]
        parts = [part.contiguous() for part in tokens.split(sizes)]
        return [part.pin_memory() for part in parts] if caches.DEVICE != "cpu" else parts

    def move(parts: list[torch.Tensor], layer: int, *, gather: bool) -> None:
        form = parts[0].view(sizes[0], cache.planes, hidden).permute(1, 0, 2)[None, :, None]
        table = torch.tensor([part.data_ptr() - offset for part in parts], device=caches.DEVICE)
        moves = mover.gather if gather else mover.scatter
        moves(rows, form, layer, table=table, offset=offset)

    whole = cache.host(len(slots))
    wanted = expected_gather(cache, slots, whole)
    for layer in range(3):
        parts = pieces(whole, layer)
        assert mover.aligned(addresses := HostMemory(parts).addresses)
        assert not mover.aligned(addresses[:1] + 1)
        move(parts, layer, gather=True)
        if caches.DEVICE != "cpu":
            torch.accelerator.synchronize()
        assert torch.equal(bits(torch.cat(parts).transpose(0, 1)), bits(wanted[:, layer]))
    source = cache.host(len(slots))
    truth = expected_scatter(cache, slots, source)
    for layer in range(3):
        parts = pieces(source, layer)
        move(parts, layer, gather=False)
        if caches.DEVICE != "cpu":
            torch.accelerator.synchronize()
    assert torch.equal(bits(cache.raw), bits(truth))


@BOTH
@pytest.mark.parametrize(
    "slots", [[4, 5, 20, 1, 0, 9], [-1, 5, 20, -1, 0, 9], [-1, -1, -1, 1, 2, 3]]
)
@pytest.mark.parametrize("kind", ["BLHNC", "(K,V) HND", "MLA LBNHC"])
def test_several_chunks_at_once_and_some_of_their_layers(transfer, kind: str, slots: list[int]):
    """As they are staged: chunk after chunk, each `[planes, layers, rows, row size]`."""
    cache = build(Spec(kind))
    mover, rows = prepare(cache, transfer, slots, 0)
    first = 1
    whole = cache.host(6)
    wanted = expected_gather(cache, slots, whole)[:, first:]
    staged = torch.stack([whole[:, first:, :3], whole[:, first:, 3:]]).to(caches.DEVICE)
    mover.gather(rows, staged, first)
    assert torch.equal(bits(torch.cat([*staged], dim=2)), bits(wanted))
    source = cache.host(6)
    untouched = cache.twin()
    truth = expected_scatter(cache, slots, source)
    mover.scatter(
        rows, torch.stack([source[:, first:, :3], source[:, first:, 3:]]).to(caches.DEVICE), first
    )
    got, wanted_cache = cache.twin(), build(cache.spec, truth)
    for plane in range(cache.planes):
        for slot in (s for s in slots if s >= 0):  # layers before the first are left alone
            wanted_cache.put(plane, 0, slot, untouched.token(plane, 0, slot))
    assert torch.equal(bits(got.raw), bits(wanted_cache.raw))


@BOTH
def test_a_cache_of_more_than_two_to_the_31_elements(transfer):
    blocks, tokens, heads, content = 2**21 + 5, 16, 1, 128  # 2^32 bytes; touched pages only
    layer = torch.empty(blocks, heads, tokens, content, dtype=torch.uint8, device=caches.DEVICE)
    view = PagedView.from_engine([layer], Geometry(hidden=64), num_layers=1)
    slots = [0, 5, blocks * tokens // 2 + 3, blocks * tokens - 1]
    source = torch.randint(1, 256, (2, 1, 4, 64), dtype=torch.uint8, device=caches.DEVICE)
    rows = rows_of(view, slots)
    mover = transfer.of(view)
    mover.scatter(rows, source[None])
    for token, slot in enumerate(slots):
        block, at = divmod(slot, tokens)
        assert torch.equal(layer[block, 0, at], source[:, 0, token].flatten())
    back = torch.zeros_like(source)
    mover.gather(rows, back[None])
    assert torch.equal(back, source)


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
@given(st.sampled_from((TorchTransfer, TritonTransfer)), situations())
def test_a_round_trip_is_the_identity_on_mapped_slots(transfer, situation):
    spec, slots, skip = situation
    cache = build(spec)
    out = cache.host(len(slots))
    gather(transfer, cache, slots, out)
    other = build(spec)
    wanted = expected_scatter(other, slots, out, skip)
    scatter(transfer, other, slots, out, skip)
    assert torch.equal(bits(other.raw), bits(wanted))
    back = out.clone()
    gather(transfer, other, slots, back, skip)
    assert torch.equal(bits(back), bits(out))


def test_the_window_is_a_view_of_the_engine_s_memory():
    cache = build(Spec("BHLNC"))
    transfer = TorchTransfer.of(view_of(cache))
    pointers = {
        window.untyped_storage().data_ptr() for layer in transfer.windows for window in layer
    }
    assert pointers == {cache.raw.untyped_storage().data_ptr()}
