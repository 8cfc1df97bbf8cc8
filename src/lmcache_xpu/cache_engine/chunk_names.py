"""Names of chunks, remembered by vLLM's own hash of the tokens up to their end.

vLLM hashes each prompt block by block, and LMCache hashes it again, chunk by chunk, when it looks
for it: half of a look-up, while the device waits. A later turn begins with tokens that were looked
up before. So the names that LMCache made are kept, by the hash of the chunk's last block.

vLLM's hash also stands for what else decides a request's KV (salt, adapter, images), so two prompts
that share one share their tokens, as they would in vLLM's own prefix cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["ChunkNames"]

KEPT = 2**16  # chunks; about 300 bytes each


class ChunkNames:
    """Wraps what names chunks for the look-ups of one scheduler.

    Args:
        database: LMCache's, of the look-up client.
        block_tokens: of a block that vLLM hashes.
    """

    def __init__(self, database: Any, block_tokens: int) -> None:
        self._database = database
        self._block_tokens = block_tokens
        self._request: Request | None = None
        self._epoch = ""
        self._names: dict[bytes, Any] = {}  # the oldest first
        partial = database.config is None or database.config.save_unfull_chunk
        if not partial and database.chunk_size % block_tokens == 0:
            database.process_tokens = functools.partial(self._process, database.process_tokens)

    def __len__(self) -> int:
        """Names that are kept."""
        return len(self._names)

    def admit(self, request: Request | None, epoch: str = "") -> None:
        """The request that is looked up next.

        Args:
            request: None if its names stand for more than its tokens and the epoch.
            epoch: what all names stand for beside tokens, by another first token; see `epochs`.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._names.clear()
        self._request = request

    def _process(
        self, process: Callable[..., Iterable[Any]], tokens: Any = None, *args: Any, **kwargs: Any
    ) -> Iterable[Any]:
        """LMCache's chunks of some tokens, without keys."""
        request, self._request = self._request, None
        names_of_all = not args and kwargs == {"make_key": False}
        if request is None or not names_of_all:
            return process(tokens, *args, **kwargs)
        own = request.all_token_ids
        # Not of tokens that stand for something else as well; see `isolation`.
        if tokens is not own and not (self._epoch and len(tokens) == len(own)):
            return process(tokens, *args, **kwargs)
        hashes = request.block_hashes
        if len(hashes) != len(tokens) // self._block_tokens:
            return process(tokens, *args, **kwargs)
        return self._named(tokens, hashes)

    def _named(self, tokens: Any, hashes: Any) -> Iterator[tuple[int, int, Any]]:
        size, name = self._database.chunk_size, self._database._get_init_hash()
        for start in range(0, len(tokens) - size + 1, size):
            end = start + size
            last = hashes[end // self._block_tokens - 1]
            known = self._names.get(last)
            if known is None:
                known = self._database._hash_tokens(tokens[start:end], name)
                self._names[last] = known
                if len(self._names) > KEPT:
                    del self._names[next(iter(self._names))]
            name = known
            yield start, end, name
