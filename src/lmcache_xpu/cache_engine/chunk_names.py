"""Names of chunks in look-ups, remembered by vLLM's own hash of the tokens up to their end.

vLLM hashes each prompt block by block. LMCache hashes it again, chunk by chunk, to look it up,
while the device waits. A later turn begins with tokens that were looked up before, so the names of
their chunks are kept. Four later turns of 16,384 + 1,024 tokens on an H200: 199 milliseconds
instead of 206 (see docs/results/h200-lookups.md).

vLLM's hash stands for all tokens up to a block's end, and for what else its own prefix cache tells
apart. Two requests with the same hash and the same salt would get the same names from LMCache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.versions.lmcache import ChunkedTokenDatabase

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["ChunkNames"]

MOST_NAMES = 2**16  # about 300 bytes each


class ChunkNames(ChunkedTokenDatabase):  # type: ignore[misc]  # untyped base
    """LMCache's token database of one scheduler. Called from vLLM's thread alone.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's description of vLLM's engine.
        block_tokens: tokens of a block that vLLM hashes.
    """

    def __init__(self, config: Any, metadata: Any, block_tokens: int) -> None:
        super().__init__(config, metadata)
        self._block_tokens = block_tokens
        self._names: dict[tuple[str, bytes], Any] = {}  # the oldest first
        self._salt = ""
        self._block_hashes: Sequence[bytes] = ()

    def __len__(self) -> int:
        """Return the number of names that are kept."""
        return len(self._names)

    @contextmanager
    def remember(self, request: Request | None, salt: str) -> Iterator[None]:
        """Use what is remembered while a request is looked up, and remember more.

        Args:
            request: whose tokens, or the first of them, are looked up; None for tokens of which
                vLLM's hashes say nothing.
            salt: what its first token stands for beside itself; see `cache_salt`.
        """
        if request is not None and self._can_name(request):
            self._salt, self._block_hashes = salt, request.block_hashes
        try:
            yield
        finally:
            self._salt, self._block_hashes = "", ()

    def process_tokens(
        self,
        tokens: torch.Tensor | Sequence[int] | None = None,
        hashes: list[Any] | None = None,
        offsets: list[int] | None = None,
        mask: torch.Tensor | None = None,
        make_key: bool = True,
        request_configs: dict[str, Any] | None = None,
    ) -> Iterable[tuple[int, int, Any]]:
        """Return the first token, the one after the last, and the name of each chunk.

        Arguments as of `TokenDatabase.process_tokens`; with `make_key` a key in place of a name.
        """
        if tokens is not None and mask is None and not make_key and self._block_hashes:
            return self._named(tokens)
        chunks: Iterable[tuple[int, int, Any]] = super().process_tokens(
            tokens, hashes, offsets, mask, make_key, request_configs
        )
        return chunks

    def _can_name(self, request: Request) -> bool:
        # A chunk that is not whole ends within a block.
        if self.config.save_unfull_chunk or self.chunk_size % self._block_tokens:
            return False
        # LMCache names what stands for images by names of its own.
        if request.mm_features or request.prompt_embeds is not None:
            return False
        # None without vLLM's prefix cache, others with hashes of other blocks.
        return len(request.block_hashes) == len(request.all_token_ids) // self._block_tokens

    def _named(self, tokens: torch.Tensor | Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        name = self._get_init_hash()
        salt, block_hashes = self._salt, self._block_hashes
        for start in range(0, len(tokens) - self.chunk_size + 1, self.chunk_size):
            end = start + self.chunk_size
            key = salt, block_hashes[end // self._block_tokens - 1]
            if key not in self._names:
                self._names[key] = self._hash_tokens(tokens[start:end], name)
                if len(self._names) > MOST_NAMES:
                    del self._names[next(iter(self._names))]
            name = self._names[key]
            yield start, end, name
