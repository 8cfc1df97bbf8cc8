"""Copies of one KV cache group's chunks between the engine's KV cache and the server's memory.

An object of the server is one chunk of one group: its layers one after another, of each the blocks
of the chunk, and a seal at the end. Nothing but this package looks into it. The server is told its
size alone.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.seals import SEAL_BYTES
from lmcache_xpu.copies.load_pipelines import LayerCopy
from lmcache_xpu.errors import LayoutError
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK, CacheGroup
from lmcache_xpu.transfer.devices import Event, StoreHandle
from lmcache_xpu.transfer.paged_view import EngineLayer, PagedView, pages_of
from lmcache_xpu.transfer.plan import HostFormat, HostMemory, Plan
from lmcache_xpu.transfer.slots import RequestRows
from lmcache_xpu.transfer.staging import Stager

# What an fp8 tier can hold in fewer bytes.
_WIDE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers of a group whose blocks are alike; they lie in an object behind the part before."""

    names: tuple[str, ...]  # of the layers; a layer of several pages is there as often
    stager: Stager
    form: HostFormat
    nbytes: int  # in an object


def block_ids(tokens: TokenRange, groups: Iterable[CacheGroup]) -> frozenset[int]:
    """Return the blocks that a range is stored from or loaded to: of a store nothing is `kept`.

    vLLM numbers the blocks of all groups together.
    """
    return frozenset(
        block
        for group in groups
        for block in tokens.blocks[group.number][tokens.kept // group.block_tokens :]
        if block != NULL_BLOCK
    )


class GroupCopies:
    """Stores and loads chunks of one group of the engine's KV caches, with so many blocks.

    Raises LayoutError for layers that can't be read as blocks, or blocks that a chunk would cut.
    """

    def __init__(
        self,
        group: CacheGroup,
        kv_caches: Mapping[str, EngineLayer],
        blocks: int,
        chunk_tokens: int,
        staging_bytes: int | None = None,
    ) -> None:
        size = group.block_tokens
        # vLLM keeps a state where a step ends: at any block, which has to be a chunk's end.
        if chunk_tokens % size or (group.recurrent and chunk_tokens != size):
            raise LayoutError(
                f"chunks of {chunk_tokens} tokens with "
                f"{'states' if group.recurrent else 'blocks'} of {size}",
                "chunks of one block" if group.recurrent else "chunks of whole blocks",
                f"Set chunk_tokens to {size}, also of a server at server_url.",
            )
        self.group = group
        self.window_chunks = group.window_chunks(chunk_tokens)  # of a hit's end; 0 for all
        self._chunk_blocks = chunk_tokens // group.block_tokens
        self._chunk_tokens = chunk_tokens
        pages = [
            (name, page) for name in group.layers for page in pages_of(kv_caches[name], blocks)
        ]
        self._dtypes = {getattr(kv_caches[name], "dtype", None) for name in group.layers}
        self.parts: list[_Part] = []
        for (size, _), alike in itertools.groupby(
            pages, key=lambda named: (named[1].shape, named[1].stride())
        ):
            names, of_part = zip(*alike, strict=True)
            view = PagedView.of_pages(of_part, group.block_tokens)
            with torch.inference_mode(False):  # what is kept may be written from either mode
                stager = Stager(view, staging_bytes)
            nbytes = view.layers * self._chunk_blocks * size[1]
            form = HostFormat(view.layers, view.planes, "layers")
            self.parts.append(_Part(names, stager, form, nbytes))
        self.object_bytes = sum(part.nbytes for part in self.parts) + SEAL_BYTES
        self.device = self.parts[0].stager.device
        words = (f"{part.form.layers}x{part.nbytes}" for part in self.parts)
        self.layout = f"group {group.number} of {group.block_tokens}: {' '.join(words)}"

    def hold_float8(self) -> None:
        """Have objects hold elements as float8 from now on; called before any is copied.

        Raises LayoutError for states, or elements of several types or of one byte.
        """
        dtype, *others = self._dtypes
        if self.group.recurrent or others or dtype not in _WIDE:
            kind = "states" if self.group.recurrent else " and ".join(map(str, self._dtypes))
            raise LayoutError(
                f"a KV cache of {kind}, and an fp8 tier",
                f"keys and values of {', '.join(map(str, _WIDE))}",
                "Leave tier_dtype unset: this model is stored as it is.",
            )
        for part in self.parts:
            part.stager.hold_float8(dtype)
        self.parts = [replace(part, nbytes=part.nbytes // dtype.itemsize) for part in self.parts]
        self.object_bytes = sum(part.nbytes for part in self.parts) + SEAL_BYTES

    def chunks(self, tokens: TokenRange, *, loading: bool = False) -> list[list[int]]:
        """Return the group's blocks of a range, chunk by chunk.

        Of a load, null blocks for what vLLM keeps.
        """
        blocks = list(tokens.blocks[self.group.number])
        kept = tokens.kept // self.group.block_tokens if loading else 0
        blocks[:kept] = [NULL_BLOCK] * kept
        size = self._chunk_blocks
        return [blocks[first : first + size] for first in range(0, len(blocks), size)]

    def lacked(self, chunks: Sequence[list[int]]) -> list[int]:
        """Return the numbers of chunks whose blocks do not hold what a hit needs."""
        stored = (self.group.is_storable(ids, self._chunk_tokens) for ids in chunks)
        return [number for number, is_stored in enumerate(stored) if not is_stored]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Order copies behind what the current stream holds; after an error, wait for them."""
        with ExitStack() as stack:
            for part in self.parts:
                part.stager.follow_engine()
                stack.enter_context(part.stager.whole())
            yield

    def store(
        self, chunks: Sequence[list[int]], objects: Sequence[torch.Tensor]
    ) -> list[StoreHandle]:
        """Enqueue a store of chunks, by their blocks, into objects of the server's memory."""
        return [stager.store(plan, memory) for stager, plan, memory in self._plans(chunks, objects)]

    def load(self, chunks: Sequence[list[int]], objects: Sequence[torch.Tensor]) -> list[Event]:
        """Enqueue a load of chunks from objects into their blocks, but null blocks."""
        return [stager.load(plan, memory) for stager, plan, memory in self._plans(chunks, objects)]

    def beside_layers(
        self,
        chunks: Sequence[list[int]],
        objects: Sequence[torch.Tensor],
        places: Sequence[Sequence[int]],  # of each part's layers, among all layers of the engine
        starts: Sequence[int],  # first layer of each layer group, of all layers of the engine
    ) -> Iterator[LayerCopy]:
        """Yield a load, as `load`, by layer groups; enqueues nothing."""
        cuts = []
        for of_part in places:
            groups = [bisect.bisect_right(starts, place) for place in of_part]
            changes = itertools.pairwise([-1, *groups])
            cuts.append([at for at, (last, group) in enumerate(changes) if last != group])
        for (stager, plan, memory), of_part in zip(
            self._plans(chunks, objects, cuts), places, strict=True
        ):
            for group in plan.groups:
                first = min(of_part[group.layers.start : group.layers.stop])
                yield LayerCopy(first, stager, group, memory)

    def _plans(
        self,
        chunks: Sequence[list[int]],
        objects: Sequence[torch.Tensor],
        starts: Iterable[Sequence[int]] = itertools.repeat([0]),
    ) -> Iterator[tuple[Stager, Plan, HostMemory]]:
        """Yield the plan of each part: a row is a block, and null blocks are left out."""
        size = self._chunk_blocks
        spans = [(at, at, at + size) for at in range(0, len(chunks) * size, size)]
        blocks = array("q", itertools.chain.from_iterable(chunks))
        numbers = torch.frombuffer(blocks, dtype=torch.int64)
        if NULL_BLOCK in blocks:
            numbers[numbers == NULL_BLOCK] = -1
        start = 0
        for part, first in zip(self.parts, starts, strict=False):
            # Not shared: each part uploads its rows in its own stream, which no other waits for.
            rows = RequestRows(part.stager.view, numbers, spans)
            memory = HostMemory([obj[start : start + part.nbytes] for obj in objects])
            start += part.nbytes
            yield part.stager, part.stager.plan(part.form, rows, first), memory
