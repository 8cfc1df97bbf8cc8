"""LMCache's names of chunks. A load takes the keys that its look-up pinned.

The scheduler's half of LMCache hashes a prompt and asks the workers by hash. To load the chunks, a
worker would hash the same tokens anew, on the engine's thread, while nothing computes yet. But the
look-up left the keys of all chunks that it promised in LMCache's list of pins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from lmcache.utils import CacheEngineKey

from lmcache_xpu.versions.lmcache import ChunkedTokenDatabase

__all__ = ["TokenDatabase"]


class TokenDatabase(ChunkedTokenDatabase):  # type: ignore[misc]  # untyped base
    """LMCache's token database of one worker.

    The engine's thread names chunks by tokens, and so does the thread that fetches for loads which
    no step waits for: what one of them reuses, the other does not see. Look-ups, in a thread of
    their own, name chunks by hashes, which always get keys of their own.
    """

    def __init__(self, config: Any, metadata: Any) -> None:
        super().__init__(config, metadata)
        self._pinned: ContextVar[Sequence[CacheEngineKey]] = ContextVar("pinned", default=())

    @contextmanager
    def reuse(self, pinned: Sequence[CacheEngineKey]) -> Iterator[None]:
        """Name the chunks of tokens by these keys, while a request is loaded.

        Args:
            pinned: keys of the first chunks of the request, in the order of its prompt.
        """
        before = self._pinned.set(pinned)
        try:
            yield
        finally:
            self._pinned.reset(before)

    def process_tokens(
        self,
        tokens: torch.Tensor | Sequence[int] | None = None,
        hashes: list[Any] | None = None,
        offsets: list[int] | None = None,
        mask: torch.Tensor | None = None,
        make_key: bool = True,
        request_configs: dict[str, Any] | None = None,
    ) -> Iterable[tuple[int, int, Any]]:
        """Return the first token, the one after the last, and the key of each chunk.

        Args:
            tokens: of a prompt, or of its first chunks.
            hashes: of chunks, instead of `tokens`.
            offsets: tokens of each of these chunks.
            mask: False for leading tokens whose chunks are left out.
            make_key: give keys; else hashes.
            request_configs: LMCache's options of the request; some are part of keys.
        """
        if tokens is not None and make_key and self._has_pinned(len(tokens)):
            return self._pinned_chunks(len(tokens), mask)
        chunks: Iterable[tuple[int, int, Any]] = super().process_tokens(
            tokens, hashes, offsets, mask, make_key, request_configs
        )
        return chunks

    def _has_pinned(self, tokens: int) -> bool:
        whole, rest = divmod(tokens, self.chunk_size)
        if not rest:
            return bool(0 < whole <= len(self._pinned.get()))
        # A chunk that is not whole is the last one of its prompt, and of its look-up.
        return bool(self.config.save_unfull_chunk and whole + 1 == len(self._pinned.get()))

    def _pinned_chunks(
        self, tokens: int, mask: torch.Tensor | None
    ) -> list[tuple[int, int, CacheEngineKey]]:
        skipped = 0 if mask is None else len(mask) - int(mask.sum())
        starts = range(0, tokens, self.chunk_size)
        return [
            (start, min(start + self.chunk_size, tokens), key)
            for start, key in zip(starts, self._pinned.get(), strict=False)
            if start >= skipped
        ]
