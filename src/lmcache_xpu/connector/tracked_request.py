"""What the scheduler's half knows of a request: its blocks, its hit, and what is stored of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.versions import lmcache_server

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from lmcache_xpu.cache.local_cache import PromptKeys

__all__ = ["BlockSizes", "ChunkNames", "Stage", "TrackedRequest"]

MOST_STORED = "lmcache.max_offload_tokens"  # LMCache's option of a request


class Stage(enum.Enum):
    """How far a request is."""

    LOOKED_UP = enum.auto()  # the server is asked for it
    LOADING = enum.auto()  # it has blocks, and the next step tells the workers of its load
    COMPUTED = enum.auto()  # its load was told, or there is none


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """How vLLM cuts a prompt into blocks, and the server into chunks.

    Args:
        chunk_tokens: tokens of a chunk.
        block_tokens: by KV cache group of vLLM, tokens of a block; 0 for one without tokens.
        moved_blocks: at the end of a request, blocks that vLLM may move: it names one again, and
            its old place holds nothing. vLLM moves those of drafted tokens in groups with states.
        keeps_last: the last token of a prompt is never part of a hit: states have to come before.
    """

    chunk_tokens: int
    block_tokens: Sequence[int]
    moved_blocks: int = 0
    keeps_last: bool = False

    @classmethod
    def of(cls, config: VllmConfig, block_tokens: Sequence[int], chunk_tokens: int) -> BlockSizes:
        """Return those of an engine."""
        mode = getattr(config.cache_config, "mamba_cache_mode", "none")
        drafter = config.speculative_config
        drafted = 0 if drafter is None else drafter.num_speculative_tokens or 0
        return cls(
            chunk_tokens, block_tokens, drafted if mode == "align" else 0, mode in ("align", "all")
        )

    @property
    def alignment(self) -> int:
        """Tokens at a multiple of which a block ends in each group."""
        return math.lcm(*filter(None, self.block_tokens))

    def blocks(self, ids: Sequence[Sequence[int]], start: int, end: int) -> list[list[int]]:
        """Return by group the block IDs of a range of tokens, of all of a request."""
        return [
            list(of_group[start // size : end // size]) if size else []
            for of_group, size in zip(ids, self.block_tokens, strict=True)
        ]


class ChunkNames:
    """The keys of a request's chunks in a cache of this process, by vLLM's own hashes of blocks.

    Such a hash stands for all tokens up to its block's end, and for what else vLLM's prefix cache
    tells apart.

    Args:
        request: vLLM's.
        keys: of its prompt, with the salt, and no chunks yet.
        sizes: of blocks and chunks.
        hashed_tokens: tokens of a block that vLLM hashes.
    """

    def __init__(
        self, request: Request, keys: PromptKeys, sizes: BlockSizes, hashed_tokens: int
    ) -> None:
        self._request, self._keys = request, keys
        self._chunk_tokens = sizes.chunk_tokens
        self._blocks = sizes.chunk_tokens // hashed_tokens

    def keys(self) -> PromptKeys:
        """Return the keys of all chunks that vLLM has hashed."""
        hashes, keys, blocks = self._request.block_hashes, self._keys, self._blocks
        if len(hashes) // blocks > len(keys):
            keys.extend(hashes[(len(keys) + 1) * blocks - 1 :: blocks])
        return keys

    @property
    def tokens(self) -> int:
        """Number of tokens in such chunks."""
        return len(self.keys()) * self._chunk_tokens


class TrackedRequest:
    """A request, from its first look-up to its end or its preemption.

    Args:
        request: vLLM's; an attribute too.
        salt: what sets its KV apart beside its tokens.
        sizes: of blocks and chunks.
        names: of its chunks, in a cache of this process; None for a server, which has its tokens.

    Attributes:
        stage: how far it is.
        blocks: by KV cache group of vLLM, IDs of its blocks.
        kept: tokens in vLLM's own prefix cache, whole blocks of each group.
        hit: tokens in the server, from the first one on.
        stored: tokens that are in the server, or were told to be stored.
        described: tokens whose blocks KV events know; see `kv_events`.
        most_stored: no token behind so many is stored; None: all.
    """

    def __init__(
        self, request: Request, salt: str, sizes: BlockSizes, names: ChunkNames | None = None
    ) -> None:
        self.request_id: str = request.request_id
        self.salt = salt
        self.options = lmcache_server.extract_request_configs_from_request(request)
        limit = (self.options or {}).get(MOST_STORED)  # as the client sent it
        self.most_stored = max(0, limit) if isinstance(limit, int) else None
        self.stage = Stage.LOOKED_UP
        self.blocks: list[list[int]] = [[] for _ in sizes.block_tokens]
        self.kept = self.hit = self.stored = self.described = 0
        self.request = request
        self._sizes = sizes
        self._names = names
        # Instead of its prompt's own.
        self._prompt = _named_images(request) if names is None else []
        self._packed: tuple[Any, Any] = (None, None)  # of tokens of this number and last one

    @property
    def is_whole_hit(self) -> bool:
        """Whether the server has all tokens."""
        return self.hit == len(self.request.all_token_ids)

    def add_blocks(self, ids: Sequence[Sequence[int]]) -> None:
        """Add blocks that it was given, by group."""
        for blocks, new in zip(self.blocks, ids, strict=True):
            last = len(blocks)
            first = max(0, last - self._sizes.moved_blocks)
            for block in new:
                if block != NULL_BLOCK and block in blocks[first:last]:
                    blocks[blocks.index(block, first, last)] = NULL_BLOCK
                blocks.append(block)

    def allocated(self, ids: Sequence[Sequence[int]]) -> None:
        """Take all blocks that it has, by group."""
        self.add_blocks([new[len(has) :] for has, new in zip(self.blocks, ids, strict=True)])

    def looked_up(self, hit: int, kept: int) -> None:
        """Take the answer to its look-up.

        Args:
            hit: tokens in the server.
            kept: tokens in vLLM's own prefix cache.
        """
        alignment = self._sizes.alignment
        self.hit = self.stored = hit
        self.kept = kept // alignment * alignment

    def range(self, start: int, end: int) -> TokenRange:
        """Return a range of its tokens, without blocks."""
        return TokenRange(self.request_id, self._key_tokens(), start, end, self.salt, self.options)

    def whole_chunks(self) -> TokenRange:
        """Return all of its chunks that may be looked up."""
        tokens, size = len(self.request.all_token_ids), self._sizes.chunk_tokens
        tokens = max(0, tokens - self._sizes.keeps_last)
        if self._names is not None:
            tokens = min(tokens, self._names.tokens)
        return self.range(0, tokens // size * size)

    def load(self) -> TokenRange | None:
        """Return the chunks of its hit that vLLM lacks; None if there are none."""
        size = self._sizes.chunk_tokens
        start, end = self.kept // size * size, self.hit
        if end <= self.kept:
            return None
        return self._with_blocks(start, end, kept=self.kept - start)

    def unloaded(self) -> TokenRange:
        """Return the chunks that `load` does, without blocks."""
        return self.range(
            self.kept // self._sizes.chunk_tokens * self._sizes.chunk_tokens, self.hit
        )

    def store(self, computed: int, *, answers: bool) -> TokenRange | None:
        """Return the chunks that a step completes, and count them as stored; None if none.

        Args:
            computed: tokens whose KV is there behind the step.
            answers: chunks with tokens of the answer are stored as well.
        """
        request, size = self.request, self._sizes.chunk_tokens
        allocated = min(
            len(blocks) * tokens
            for blocks, tokens in zip(self.blocks, self._sizes.block_tokens, strict=True)
            if tokens
        )
        bounds = [computed, allocated, len(request.all_token_ids)]
        if not answers:
            bounds.append(request.num_prompt_tokens)
        if self.most_stored is not None:
            bounds.append(self.most_stored)
        if self._names is not None:
            bounds.append(self._names.tokens)
        start, end = self.stored, min(bounds) // size * size
        if end <= start:
            return None
        self.stored = end
        return self._with_blocks(start, end)

    def blocks_to(self, end: int) -> list[int]:
        """Return the IDs of its first group's blocks up to a token."""
        return self.blocks[0][: end // self._sizes.block_tokens[0]]

    def _with_blocks(self, start: int, end: int, kept: int = 0) -> TokenRange:
        return TokenRange(
            self.request_id,
            self._key_tokens(),
            start,
            end,
            self.salt,
            self.options,
            self._sizes.blocks(self.blocks, start, end),
            kept,
        )

    def _key_tokens(self) -> Any:
        """Return its tokens as LMCache's keys have them; packed anew when there are others."""
        if self._names is not None:
            return self._names.keys()
        tokens: Sequence[int] = self.request.all_token_ids
        which = len(tokens), tokens[-1] if len(tokens) else None
        if self._packed[0] != which:
            named = [*self._prompt, *tokens[len(self._prompt) :]] if self._prompt else list(tokens)
            self._packed = which, lmcache_server.key_tokens(named)
        return self._packed[1]


def _named_images(request: Request) -> list[int]:
    """Return a prompt's tokens, with names of its images in their places; none without images."""
    names, places = lmcache_server.extract_mm_features(request)
    if not (names and places):
        return []
    tokens = torch.tensor(request.prompt_token_ids)
    lmcache_server.apply_mm_hashes_to_token_ids(tokens, names, places)
    named: list[int] = tokens.tolist()
    return named
