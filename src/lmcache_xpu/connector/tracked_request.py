"""What the scheduler's half knows of a request: its blocks, its hit, and what is stored of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.utils import (
    apply_mm_hashes_to_token_ids,
    extract_mm_features,
    extract_request_configs_from_request,
)

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.versions.lmcache_server import key_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from lmcache_xpu.cache.local_cache import PromptKeys

MOST_STORED = "lmcache.max_offload_tokens"  # LMCache's option of a request


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """How vLLM cuts a prompt into blocks, and the server into chunks."""

    chunk_tokens: int
    block_tokens: Sequence[int]  # by KV cache group of vLLM; 0 for one without tokens
    hashed_tokens: int = 0  # of a block that vLLM hashes
    # At the end of a request, blocks that vLLM may move: it names one again, and its old place
    # holds nothing. vLLM moves those of drafted tokens in groups with states.
    moved_blocks: int = 0
    keeps_last: bool = False  # the last token is never part of a hit: states have to come before

    @classmethod
    def of(cls, config: VllmConfig, block_tokens: Sequence[int], chunk_tokens: int) -> BlockSizes:
        """Return those of an engine."""
        mode = getattr(config.cache_config, "mamba_cache_mode", "none")
        drafted = config.num_speculative_tokens or 0
        return cls(
            chunk_tokens,
            block_tokens,
            block_tokens[0],
            moved_blocks=drafted if mode == "align" else 0,
            keeps_last=mode in ("align", "all"),
        )


class TrackedRequest:
    """A request, from its first look-up to its end or its preemption.

    Keys of its chunks in a cache of this process are filled here, by vLLM's hashes of blocks. A
    server gets its tokens.
    """

    def __init__(
        self, request: Request, salt: str, sizes: BlockSizes, keys: PromptKeys | None = None
    ) -> None:
        self.request_id: str = request.request_id
        self.request = request
        self.sizes = sizes
        self.has_blocks = False  # until vLLM gives it some, it is looked up
        self.in_step = False  # its load is inside its step
        self.blocks: list[list[int]] = [[] for _ in sizes.block_tokens]  # IDs, by KV cache group
        self.kept = 0  # tokens in vLLM's own prefix cache, whole blocks of each group
        self.hit = 0  # tokens in the server, from the first one on
        self.stored = 0  # tokens that are in the server, or are about to be stored
        self.described = 0  # tokens whose blocks KV events know; see `kv_events`
        self._salt = salt
        self._options = extract_request_configs_from_request(request)
        limit = (self._options or {}).get(MOST_STORED)  # as the client sent it
        # No token behind so many is stored; None: all.
        self.most_stored = max(0, limit) if isinstance(limit, int) else None
        self._keys = keys
        # Instead of its prompt's own.
        self._prompt = _named_images(request) if keys is None else []
        self._packed: tuple[Any, Any] = (None, None)  # of tokens of this number and last one

    def add_blocks(self, ids: Sequence[Sequence[int]]) -> None:
        """Add blocks that it was given, by group."""
        for blocks, new in zip(self.blocks, ids, strict=True):
            last = len(blocks)
            first = max(0, last - self.sizes.moved_blocks)
            for block in new:
                if block != NULL_BLOCK and block in blocks[first:last]:
                    blocks[blocks.index(block, first, last)] = NULL_BLOCK
                blocks.append(block)

    def allocated(self, ids: Sequence[Sequence[int]]) -> None:
        """Take all blocks that it has, by group."""
        self.add_blocks([new[len(has) :] for has, new in zip(self.blocks, ids, strict=True)])

    def looked_up(self, hit: int, kept: int) -> None:
        """Take how many tokens are in the server, and in vLLM's own prefix cache."""
        # A block ends at a multiple of so many tokens in each group.
        alignment = math.lcm(*filter(None, self.sizes.block_tokens))
        self.hit = self.stored = hit
        self.kept = kept // alignment * alignment

    def range(self, start: int, end: int, kept: int = 0) -> TokenRange:
        """Return a range of its tokens, with the blocks that it has of them."""
        blocks = [
            of_group[start // tokens : end // tokens] if tokens else []
            for of_group, tokens in zip(self.blocks, self.sizes.block_tokens, strict=True)
        ]
        names = self.request_id, self.key_tokens()
        return TokenRange(*names, start, end, self._salt, self._options, blocks, kept)

    def whole_chunks(self) -> TokenRange:
        """Return all of its chunks that may be looked up."""
        tokens = max(0, len(self.request.all_token_ids) - self.sizes.keeps_last)
        size = self.sizes.chunk_tokens
        return self.range(0, self._named_tokens(tokens) // size * size)

    def load(self) -> TokenRange | None:
        """Return the chunks of its hit that vLLM lacks; None if there are none."""
        size = self.sizes.chunk_tokens
        start = self.kept // size * size
        if self.hit <= self.kept:
            return None
        return self.range(start, self.hit, self.kept - start)

    def loads_first_of(self, request: Request, kept: int) -> bool:
        """Whether its load fills the block that a request lacks first, which has `kept` tokens."""
        block = kept // self.sizes.hashed_tokens
        if not self.kept <= kept < self.hit or block >= len(request.block_hashes):
            return False
        return bool(self.request.block_hashes[block] == request.block_hashes[block])

    def store(self, computed: int, *, answers: bool) -> TokenRange | None:
        """Return the chunks that a step completes, and count them as stored; None if none.

        Behind the step the KV of so many tokens is `computed`. With `answers`, chunks with tokens
        of the answer are stored as well.
        """
        size = self.sizes.chunk_tokens
        allocated = min(
            len(blocks) * tokens
            for blocks, tokens in zip(self.blocks, self.sizes.block_tokens, strict=True)
            if tokens
        )
        last = len(self.request.all_token_ids)
        if not answers:
            last = min(last, self.request.num_prompt_tokens)
        if self.most_stored is not None:
            last = min(last, self.most_stored)
        start, end = self.stored, min(computed, allocated, self._named_tokens(last)) // size * size
        if end <= start:
            return None
        self.stored = end
        return self.range(start, end)

    def key_tokens(self) -> Any:
        """Return its tokens as keys have them; made anew when there are others."""
        if (keys := self._keys) is not None:
            hashes = self.request.block_hashes
            blocks = self.sizes.chunk_tokens // self.sizes.hashed_tokens
            if len(hashes) // blocks > len(keys):
                keys.extend(hashes[(len(keys) + 1) * blocks - 1 :: blocks])
            return keys
        tokens: Sequence[int] = self.request.all_token_ids
        which = len(tokens), tokens[-1] if len(tokens) else None
        if self._packed[0] != which:
            named = [*self._prompt, *tokens[len(self._prompt) :]] if self._prompt else list(tokens)
            self._packed = which, key_tokens(named)
        return self._packed[1]

    def _named_tokens(self, tokens: int) -> int:
        """Return how many of so many tokens are in chunks that have a key."""
        if self._keys is None:
            return tokens
        return min(tokens, len(self.key_tokens()) * self.sizes.chunk_tokens)


def _named_images(request: Request) -> list[int]:
    """Return a prompt's tokens, with names of its images in their places; none without images."""
    names, places = extract_mm_features(request)
    if not (names and places):
        return []
    tokens = torch.tensor(request.prompt_token_ids)
    apply_mm_hashes_to_token_ids(tokens, names, places)
    named: list[int] = tokens.tolist()
    return named
