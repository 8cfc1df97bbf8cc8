"""Slot mappings: from tokens of a request to rows of the paged view.

A slot is `block * tokens per block + token in block`, as vLLM numbers them; a negative slot
maps to nothing. A row of the view is one token, or one block where blocks are opaque.

All of it runs on the host, so that nothing here waits for the device; `rows_to` takes the
result there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmcache_xpu.devices import is_host, upload
from lmcache_xpu.errors import SlotError
from lmcache_xpu.paged_view import PagedView


class Rows(NamedTuple):
    """Which rows of a chunk go to which rows of the paged view."""

    engine: torch.Tensor  # [n] int64, row numbers: block * rows per block + row
    host: torch.Tensor | None  # [n] int64, rows of the chunk; None for all of them in order
    total: int  # rows of the whole chunk


def check_slots(view: PagedView, slot_mapping: torch.Tensor) -> torch.Tensor:
    """The mapping as int64 on the host, every slot in range.

    Waits for the engine's stream if the mapping is on its device.

    Raises:
        SlotError: not a 1-D tensor of integers, or a slot that the cache does not have.
    """
    if not isinstance(slot_mapping, torch.Tensor):
        raise SlotError(f"slot_mapping of type {type(slot_mapping).__name__}", "a tensor")
    kind = slot_mapping.dtype
    if slot_mapping.dim() != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise SlotError(
            f"slot_mapping of shape {list(slot_mapping.shape)} and {kind}",
            "one integer per token of the request",
        )
    slots = slot_mapping.to(device="cpu", dtype=torch.int64)
    if slots.numel() and (largest := int(slots.max())) >= view.num_slots:
        raise SlotError(
            f"slot {largest}", f"slots below {view.num_slots}, the size of the paged KV cache"
        )
    return slots


def request_rows(
    view: PagedView, slots: torch.Tensor, spans: Sequence[tuple[int, int]], cached: int = 0
) -> list[Rows]:
    """The rows of each chunk of a request.

    Args:
        view: the paged view.
        slots: `[tokens]` from `check_slots`, those of the whole request.
        spans: first token of each chunk, and the token after its last.
        cached: leading tokens of the request to leave alone, because the engine has them.

    Raises:
        SlotError: a chunk that is no part of the request; or opaque blocks, and a chunk, the
            cached tokens or the slots cut one.
    """
    size = view.tokens_per_row
    for start, end in spans:
        if not 0 <= start <= end <= slots.numel():
            raise SlotError(
                f"a chunk of tokens {start}:{end} with {slots.numel()} slots",
                "0 <= start <= end <= the number of slots",
            )
        skip = min(end - start, max(0, cached - start))
        if size > 1 and (start % size or (end - start) % size or skip % size):
            raise SlotError(
                f"a chunk of tokens {start}:{end} of which {skip} are skipped",
                f"multiples of {size}: this engine packs the {size} tokens of a block together",
                "Use a chunk size that is a multiple of the block size, and no partial chunks.",
            )
    rows = slots if size == 1 else _whole_blocks(slots, size, spans)
    # One look at all of them: most requests have no hole, and then chunks are just slices.
    holes = bool((rows < 0).any()) if len(rows) else False
    return [
        _chunk(rows, start // size, end // size, -(-cached // size), holes) for start, end in spans
    ]


def _chunk(rows: torch.Tensor, start: int, end: int, cached: int, holes: bool) -> Rows:
    first = min(end, max(start, cached))
    engine, total = rows[first:end], end - start
    if not holes:
        host = None if first == start else torch.arange(first - start, total)
        return Rows(engine=engine, host=host, total=total)
    mapped = (engine >= 0).nonzero().squeeze(1)
    return Rows(engine=engine[mapped], host=mapped + (first - start), total=total)


def rows_to(rows: list[Rows], device: torch.device) -> list[Rows]:
    """The same rows on the engine's device, in one copy; themselves where they are there."""
    if is_host(device) or not rows:
        return rows
    parts = [part for r in rows for part in (r.engine, r.host) if part is not None]
    lengths = [len(part) for part in parts]
    there = iter(torch.split(upload(torch.cat(parts), device), lengths))
    return [
        Rows(engine=next(there), host=None if r.host is None else next(there), total=r.total)
        for r in rows
    ]


def _whole_blocks(slots: torch.Tensor, size: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Block numbers of a request, -1 for unmapped ones, with every chunk in whole blocks."""
    groups = slots[: slots.numel() // size * size].view(-1, size)
    blocks = groups[:, 0].div(size, rounding_mode="floor")
    straight = ((blocks[:, None] * size + torch.arange(size)) == groups).all(dim=1)
    unmapped = (groups < 0).all(dim=1)
    for block in (~(straight | unmapped)).nonzero().flatten().tolist():
        if any(start <= block * size < end for start, end in spans):
            raise SlotError(
                f"slots that cut or reorder a block of {size} tokens",
                "whole blocks with their tokens in order",
            )
    return blocks.where(~unmapped, -1)
