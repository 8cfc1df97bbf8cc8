"""Layerwise loads of ranks that hold the same: the first one's is lent, the others load that.

There is one loan for each load, as with whole chunks: the first rank fetches all groups of layers
when the load begins. So no rank waits for another one at a layer, and a load that fails half-way is
that rank's alone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.cache_engine.loans import loaded_tokens, order_of

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

    from lmcache_xpu.cache_engine.guarded_connectors import LayerwiseConnector
    from lmcache_xpu.cache_engine.loans import Borrower, Lender

__all__ = ["Spans", "borrow_layers", "lend_layers", "name_of"]

Spans = Sequence[Sequence[int]]  # first token of each chunk, and the one after its last
Layers = Generator[torch.Tensor | None, None, None]


def name_of(load: Mapping[str, Any]) -> str:
    """Return a name that all ranks have for a load, by LMCache's keyword arguments of it.

    LMCache does not say whose load it is. A slot is that of one request.
    """
    slots: torch.Tensor = load["slot_mapping"]
    return f"{len(slots)} tokens, the last of them in slot {int(slots[-1])}"


def lend_layers(
    lender: Lender,
    load: Mapping[str, Any],
    groups: Sequence[Future[list[MemoryObj]]],
    spans: Spans,
) -> None:
    """Wait until all of a load is fetched, and lend what each group of layers has of it.

    Args:
        lender: tells the others.
        load: LMCache's keyword arguments of it.
        groups: what is fetched, by group; up to the first chunk that is missing.
        spans: of its chunks.

    Raises:
        Exception: whatever a tier raised. Nothing is lent then, and all memory is given up.
    """
    starts, ends = spans
    try:
        fetched = [group.result() for group in groups]
        count = min(map(len, fetched), default=0)
        objs = [obj for group in fetched for obj in group[:count]]
        lender.lend(order_of(load), name_of(load), objs, starts[:count], ends[:count])
    except Exception:
        _give_up(groups)
        raise


def borrow_layers(
    borrower: Borrower, connector: LayerwiseConnector, load: Mapping[str, Any]
) -> tuple[Layers, Spans]:
    """Wait for word of a load, and begin it with what was lent.

    Args:
        borrower: hears from the first rank.
        connector: of this rank.
        load: LMCache's keyword arguments of it.

    Returns:
        The load, which goes on in the steps of LMCache's `retrieve_layer` and gives back what it
        borrowed, and the spans of its chunks. With none of these it is not to be stepped.

    Raises:
        SeamError: see `Borrower.borrow`.
    """
    objs, starts, ends = borrower.borrow(order_of(load), name_of(load))
    layers = _load(connector, objs, starts, ends, load)
    if objs:
        next(layers)
    return layers, (starts, ends)


def _load(
    connector: LayerwiseConnector,
    objs: Sequence[MemoryObj],
    starts: Sequence[int],
    ends: Sequence[int],
    load: Mapping[str, Any],
) -> Layers:
    """Load memory that lies group by group; yields last which tokens it loaded, on the host."""
    try:
        copies = connector.batched_to_gpu(starts, ends, **load)
        next(copies)
        for number in range(len(connector.groups)):
            yield None
            copies.send(objs[number * len(starts) : (number + 1) * len(starts)])
    finally:  # the copies hold what they need
        for obj in objs:
            obj.ref_count_down()
    yield None
    next(copies)
    yield loaded_tokens(len(load["slot_mapping"]), starts, ends)


def _give_up(groups: Sequence[Future[list[MemoryObj]]]) -> None:
    """Let go of what was fetched for a load, as LMCache does behind one that went well."""
    for group in groups:
        if group.exception() is None:
            for obj in group.result():
                obj.ref_count_down()
                if obj.is_pinned:
                    obj.unpin()
