"""One request stored from one cache and loaded into others, on every way that bytes can take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import oracle
import torch
import ways
from host import Arena
from hypothesis import strategies as st
from layouts import FORMS, Cache, Layout, layouts

from lmcache_xpu.errors import TransferError
from lmcache_xpu.gpu_connector.base import PagedMemConnector


@dataclass(frozen=True)
class Request:
    """Tokens, the chunks of them that are moved, and the slots of both caches."""

    tokens: int
    spans: tuple[tuple[int, int], ...]
    here: tuple[int, ...]
    there: tuple[int, ...]
    cached: int


@st.composite
def requests(draw: st.DrawFn, here: Layout, there: Layout) -> Request:
    """Chunks that end inside of blocks, gaps, holes and repeats; whole blocks if opaque."""
    block = here.sizes["n"] if here.opaque else 1
    chunk = draw(st.integers(1, 6 if block == 1 else 2)) * block
    count = draw(st.integers(0, 5))
    last = draw(st.integers(1, chunk // block)) * block
    sizes = [chunk] * (count - 1) + [last] * bool(count)
    start = draw(st.integers(0, 2)) * chunk
    spans = []
    for size in sizes:
        spans.append((start, start + size))
        start += size
    kept = [span for span in spans if draw(st.integers(0, 4))]
    tokens = start + draw(st.integers(0, 2)) * block
    cached = draw(st.one_of(st.just(0), st.integers(0, max(1, tokens) // block + 1))) * block
    slots = [
        _slots(random.Random(draw(st.integers(0, 2**32))), layout, tokens, draw(st.integers(0, 3)))
        for layout in (here, there)
    ]
    return Request(tokens, tuple(kept), *slots, cached)


def _slots(rng: random.Random, layout: Layout, tokens: int, kind: int) -> tuple[int, ...]:
    """0: as vLLM's, block after block; 1: with holes; 2: in any order; 3: with repeats, too."""
    size, blocks = layout.sizes["n"], layout.sizes["b"]
    if layout.opaque or kind < 2:
        order = rng.sample(range(blocks), blocks)
        if kind == 3 or blocks * size < tokens:
            order = rng.choices(range(blocks), k=-(-tokens // size))
        if kind:
            order = [-1 if rng.random() < 0.3 else number for number in order]
        slots = [-1 if b < 0 else b * size + n for b in order for n in range(size)][:tokens]
        if kind and not layout.opaque:
            slots = [-1 if rng.random() < 0.2 else slot for slot in slots]
        return tuple(slots)
    all_slots = range(-1 if kind == 3 else 0, blocks * size)
    if kind == 2 and tokens <= len(all_slots):
        return tuple(rng.sample(all_slots, tokens))
    return tuple(rng.choices(all_slots, k=tokens))


@dataclass(frozen=True)
class Case:
    """A request, the caches that it goes from and to, and the ways."""

    here: Layout
    there: Layout
    store: ways.Way
    load: ways.Way
    request: Request
    moves: bool  # the engine moves its cache between two loads
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two caches that hold the same tokens in different layouts."""
    here = draw(layouts())
    opaque, mla = here.opaque, here.mla
    forms = tuple(
        form for form in FORMS if (form == "opaque") == opaque and form.startswith("latent") == mla
    )
    fixed = {"l": here.sizes["l"], "d": here.head, "h": here.sizes.get("h", 1)}
    if opaque:
        there = here  # an engine's own order within a block means nothing to another one
    else:
        other = draw(layouts(forms, **fixed))
        there = Layout(
            other.form,
            other.memory,
            other.sizes,
            other.padding,
            other.lead,
            here.dtype,
            other.named,
        )
    store, load = draw(ways.every), draw(ways.every)
    load = ways.Way(store.order, *list(vars(load).values())[1:])
    request = draw(requests(here, there))
    return Case(here, there, store, load, request, draw(st.booleans()), draw(st.integers(0, 2**32)))


def run(case: Case) -> None:
    """Move, and compare every byte of both caches and of host memory."""
    request, spans = case.request, case.request.spans
    source, target = Cache(case.here, case.seed), Cache(case.there, case.seed + 1)
    connector = ways.connect(case.here, case.store)
    dtype = case.here.dtype
    largest = max((end - start for start, end in spans), default=1)
    arena = Arena(
        max(1, len(ways.groups_of(connector)) * len(spans)),
        connector.get_shape(largest).numel() * dtype.itemsize + 8,
        case.seed,
    )
    groups = ways.groups_of(connector)
    objs = [
        [
            arena.allocate(connector.get_shape(end - start), dtype, ways.format_of(connector))
            for start, end in spans
        ]
        for _ in groups
    ]
    chunks = ways.chunks_of(objs, connector, case.store, spans)
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    layer = largest * source.paged.row * source.paged.planes
    before = bytearray(source.bytes())

    def buffer(way: ways.Way) -> int:
        return max(1, layer * way.buffer // 100)

    with ways.taken(case.store, buffer(case.store)):
        moves = oracle.pairs(source.paged, chunks, request.here)
        arguments = {"starts": starts, "ends": ends, "kvcaches": source.engine}
        slots = torch.tensor(request.here, dtype=torch.int64)
        if _refused(
            connector,
            "batched_from_gpu",
            objs,
            arguments | {"slot_mapping": slots},
            case.store,
            spans,
        ):
            return _unchanged(source, before, arena)
        oracle.store(before, arena.wanted, moves)
    oracle.compare("host memory after a store", arena.bytes(), arena.wanted)
    oracle.compare("the cache that was read", source.bytes(), before)

    loader = ways.connect(case.there, case.load)
    targets = [target, Cache(case.there, case.seed + 2)] if case.moves else [target]
    with ways.taken(case.load, buffer(case.load)):
        for number, cache in enumerate(targets):
            wanted = bytearray(cache.bytes())
            skip = 0 if number else request.cached
            arguments = {"starts": starts, "ends": ends, "kvcaches": cache.engine}
            arguments["slot_mapping"] = torch.tensor(request.there, dtype=torch.int64)
            arguments["vllm_cached_tokens"] = skip
            if _refused(loader, "batched_to_gpu", objs, arguments, case.load, spans):
                return _unchanged(cache, wanted, arena)
            moves = oracle.pairs(cache.paged, chunks, request.there, skip)
            oracle.load(wanted, arena.wanted, moves, cache.bytes())
            oracle.compare("the cache after a load", cache.bytes(), wanted)
            oracle.compare("host memory after a load", arena.bytes(), arena.wanted)
    for group in objs:
        for obj in group:
            if obj.get_ref_count() != 1:
                raise oracle.MismatchError(f"{obj.get_ref_count()} references are left of one")
            obj.ref_count_down()
    return None


def _refused(
    connector: PagedMemConnector,
    direction: str,
    objs: Sequence,
    arguments: dict,
    way: ways.Way,
    spans,
) -> bool:
    """Make the call; True if it was refused as it must be: a layer of a chunk fits no buffer."""
    too_small = 0 < way.buffer < 100 and bool(spans)
    try:
        ways.call(connector, direction, objs, **arguments)
    except TransferError as error:
        if too_small and "raise staging_mib" in str(error):
            return True
        raise
    if too_small:
        raise oracle.MismatchError(
            "a layer of a chunk went through a buffer that is too small for it"
        )
    return False


def _unchanged(cache: Cache, before: bytes | bytearray, arena: Arena) -> None:
    oracle.compare("a cache after a refusal", cache.bytes(), before)
    oracle.compare("host memory after a refusal", arena.bytes(), arena.wanted)
