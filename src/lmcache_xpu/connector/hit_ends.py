"""Where a later prompt may begin to differ, so that all layers keep what a hit up to there needs.

Layers of whole attention can be hit at the end of any chunk. Layers with a window need the window
before that end, and layers with states need the state at it. Kept are

    last       the last whole chunk of the prompt
    question   chunk ends before it: the next prompt may end with another question
    junction   the end of the prefix whose attention a cache has: there earlier prompts parted
    windows    all in the first tokens, and one again and again behind these

vLLM keeps a state where a step ends, and ends one at a request's `shared_prefix_boundary`. It sets
that itself where its own prefix cache has attention behind the last state (Marconi,
arXiv:2411.19379). Here it is set to one of these ends after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK, WINDOW_TOKENS, CacheGroup

if TYPE_CHECKING:
    from vllm.v1.request import Request

QUESTION_TOKENS = 256  # that a question may have, with an answer or a template before it
LEAST_TOKENS = 128  # of a step that ends for it: a step takes as long with fewer


class _Ends(NamedTuple):
    tokens: list[int]  # the next one last
    chunks: dict[int, set[int]]  # numbers of chunks that are kept, by the chunks of a window


class HitEnds:
    """The ends of one scheduler's requests; `groups` are KV cache groups that are stored."""

    def __init__(self, groups: Sequence[CacheGroup], chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._keeps_states = any(group.recurrent for group in groups)
        self._windows = [
            group for group in groups if group.window is not None and not group.recurrent
        ]
        self._ends: dict[str, _Ends] = {}  # by request

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], chunk_tokens: int) -> Self | None:
        """Return those of an engine; None if all layers can be hit at the end of any chunk."""
        some = any(group.recurrent or group.window is not None for group in groups)
        return cls(groups, chunk_tokens) if some else None

    def begin(self, request: Request, start: int, shared: int) -> None:
        """Choose the ends of a request that may be scheduled next, with what vLLM has chosen.

        Its first `start` tokens are there, and a cache has the attention of `shared` ones.
        """
        size = self._chunk_tokens
        last = request.num_prompt_tokens // size * size
        step = -(-LEAST_TOKENS // size) * size
        # Behind the last whole chunk there may be room for the question: a step less.
        first = (request.num_prompt_tokens - QUESTION_TOKENS) // size * size
        question = range(last - step, first - 1, -step)
        ends = {request.shared_prefix_boundary, shared, *question}
        kept = {
            window: self._kept_chunks((*ends, last), last, window)
            for window in {group.window_chunks(size) for group in self._windows}
        }
        self._ends[request.request_id] = _Ends(sorted(ends, reverse=True), kept)
        self.go_on(request, start)

    def go_on(self, request: Request, computed: int) -> None:
        """Set where a request's next step ends, before which so many tokens are computed."""
        chosen = self._ends.get(request.request_id)
        if chosen is None or not self._keeps_states:
            return
        while chosen.tokens and chosen.tokens[-1] <= computed:
            chosen.tokens.pop()
        if chosen.tokens:
            request.shared_prefix_boundary = chosen.tokens[-1]

    def kept(self, store: TokenRange) -> TokenRange:
        """Return a store without the chunks of windows that no hit needs: their blocks are null."""
        chosen, size = self._ends.get(store.request_id), self._chunk_tokens
        if chosen is None or not self._windows:
            return store
        blocks = list(store.blocks)
        for group in self._windows:
            kept, per_chunk = chosen.chunks[group.window_chunks(size)], size // group.block_tokens
            ids = blocks[group.number]
            blocks[group.number] = [
                block if store.start // size + place // per_chunk in kept else NULL_BLOCK
                for place, block in enumerate(ids)
            ]
        return replace(store, blocks=blocks)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._ends.pop(request_id, None)

    def _kept_chunks(self, ends: Iterable[int], last: int, window: int) -> set[int]:
        """Return the chunks that windows of so many chunks need before these ends."""
        size = self._chunk_tokens
        kept = set(range(WINDOW_TOKENS // size))
        for end in (*ends, *range(WINDOW_TOKENS, last, WINDOW_TOKENS)):
            kept.update(range(max(0, end // size - window), end // size))
        return kept
