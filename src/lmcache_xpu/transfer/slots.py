"""Which rows of the paged view the chunks of a request mean: by slots, or by blocks.

A slot is `block * tokens per block + token in block`, as vLLM numbers them; a negative slot
maps to nothing. All of it is computed on the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmcache_xpu.errors import SlotError
from lmcache_xpu.transfer.devices import upload
from lmcache_xpu.transfer.paged_view import PagedView


class Rows(NamedTuple):
    """Which rows of some chunks go to which rows of the paged view."""

    engine: torch.Tensor  # [n] int64, row numbers: block * rows per block + row
    host: torch.Tensor | None  # [n] int64, rows of the chunk; None for all of them in order


def blocks_of(slots: torch.Tensor, block_tokens: int) -> set[int]:
    """Return the engine's blocks of slots, which are on the host; unmapped slots have none."""
    return set(torch.unique_consecutive(slots[slots >= 0] // block_tokens).tolist())


class RequestRows:
    """The rows of a request's chunks, checked; copied to the device when they are needed.

    Args:
        rows: `[rows of the request]` int64 on the host, rows of the view, negative where unmapped.
        spans: per chunk its first row, the first one to move, and the row after its last.

    Raises:
        SlotError: a row that the view does not have.
    """

    def __init__(
        self, view: PagedView, rows: torch.Tensor, spans: Sequence[tuple[int, int, int]]
    ) -> None:
        smallest, largest = map(int, torch.aminmax(rows)) if rows.numel() else (0, -1)
        count = view.shape[0] * view.shape[1]
        if largest >= count:
            kind = "slot" if view.tokens_per_row == 1 else "block"
            raise SlotError(
                f"{kind} {largest}", f"{kind}s below {count}, the size of the paged KV cache"
            )
        self.totals = [end - start for start, _, end in spans]  # rows of each chunk on the host
        self._spans = spans
        self._rows = rows
        self._holes = smallest < 0  # most requests have none: chunks are just slices
        self._device = view.device
        self._on_device: torch.Tensor | None = None  # all of them, once some are needed
        self._made: dict[tuple[int, int], Rows] = {}

    def chunks(self, first: int, last: int) -> Rows:
        """Return the rows of chunks `first` to `last - 1`, one after another, on the view's device.

        Made once, for all layers. May enqueue a copy in the current stream; waits for nothing.
        """
        if (made := self._made.get((first, last))) is not None:
            return made
        spans = self._spans[first:last]
        starts, moves, ends = zip(*spans, strict=True)
        if self._holes or starts != moves:
            engine, host, before = [], [], 0
            for start, move, end in spans:
                mapped = (self._rows[move:end] >= 0).nonzero().squeeze(1) + move
                engine.append(self._rows[mapped])
                host.append(mapped - start + before)
                before += end - start
            both = upload(torch.stack([torch.cat(engine), torch.cat(host)]), self._device)
            made = Rows(both[0], both[1])
        elif starts[1:] != ends[:-1]:
            parts = [self._rows[start:end] for start, _, end in spans]
            made = Rows(upload(torch.cat(parts), self._device), None)
        else:
            if self._on_device is None:
                self._on_device = upload(self._rows, self._device)
            made = Rows(self._on_device[starts[0] : ends[-1]], None)
        self._made[first, last] = made
        return made


def request_rows(
    view: PagedView, slot_mapping: torch.Tensor, spans: Sequence[tuple[int, int]], cached: int = 0
) -> RequestRows:
    """Return the rows of each chunk of a request.

    Waits for the engine's stream if the mapping is on its device.

    Args:
        slot_mapping: `[tokens]` integers, one slot per token of the whole request.
        spans: first token of each chunk, and the token after its last.
        cached: leading tokens of the request to leave alone, because the engine has them.

    Raises:
        SlotError: no such mapping, or a slot that the cache does not have; a chunk that is no part
            of the request; or opaque blocks, and a chunk, the cached tokens or the slots cut one.
    """
    slots = host_slots(slot_mapping)
    size, count = view.tokens_per_row, len(slots)
    for start, end in spans:
        if not 0 <= start <= end <= count:
            raise SlotError(
                f"a chunk of tokens {start}:{end} with {count} slots",
                "0 <= start <= end <= the number of slots",
            )
        skip = min(end - start, max(0, cached - start))
        if start % size or (end - start) % size or skip % size:
            raise SlotError(
                f"a chunk of tokens {start}:{end} of which {skip} are skipped",
                f"multiples of {size}: this engine packs the {size} tokens of a block together",
                "Use a chunk size that is a multiple of the block size, and no partial chunks.",
            )
    rows = slots if size == 1 else _whole_blocks(slots, size, spans)
    in_rows = []
    for start, end in spans:
        first, last = start // size, end // size
        in_rows.append((first, min(last, max(first, -(-cached // size))), last))
    return RequestRows(view, rows, in_rows)


def host_slots(slot_mapping: torch.Tensor) -> torch.Tensor:
    """Return a slot mapping as int64 on the host; errors as of `request_rows`."""
    if not isinstance(slot_mapping, torch.Tensor):
        raise SlotError(f"slot_mapping of type {type(slot_mapping).__name__}", "a tensor")
    kind = slot_mapping.dtype
    if slot_mapping.dim() != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise SlotError(
            f"slot_mapping of shape {list(slot_mapping.shape)} and {kind}",
            "one integer per token of the request",
        )
    return slot_mapping.to(device="cpu", dtype=torch.int64)


def _whole_blocks(slots: torch.Tensor, size: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return block numbers of a request, -1 for unmapped ones, with every chunk in whole blocks."""
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
