"""What a cache that forgets nothing could reuse of a trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from loadtests.traces.trace import Request

__all__ = ["Reuse", "best_reuse"]

Reuse = dict[str, float | int]


def best_reuse(requests: Iterable[Request], *, block_tokens: int, chunk_tokens: int) -> Reuse:
    """Return the tokens of the prompts, and of these, what earlier prompts had brought already.

    Only whole chunks from a prompt's begin count, since that is what LMCache stores. The last
    token of a prompt is computed always. Answers are not counted: a trace doesn't tell what
    became of them.

    Args:
        requests: in the order in which they are sent.
        block_tokens: that a block of the trace holds.
        chunk_tokens: that a chunk of the cache holds.
    """
    # A prefix of blocks is a node of a tree, by its parent and its last block: no prefix is
    # compared with all others. A chunk is known by the node that its end lies in, and its end.
    nodes: dict[tuple[int, Hashable], int] = {}
    stored: set[tuple[int, int]] = set()
    prompts = prompt_tokens = reusable = 0
    for number, request in enumerate(requests):
        prompts += 1
        prompt_tokens += request.input_tokens
        node, path = 0, []
        whole = request.input_tokens // block_tokens
        tail = [] if len(request.blocks) > whole else [("alone", number)]
        for block in [*request.blocks, *tail]:
            node = nodes.setdefault((node, block), len(nodes) + 1)
            path.append(node)
        hit, reusing = 0, True
        for end in range(chunk_tokens, request.input_tokens + 1, chunk_tokens):
            chunk = (path[min(-(-end // block_tokens), len(path)) - 1], end)
            reusing = reusing and chunk in stored
            if reusing:
                hit = end
            stored.add(chunk)
        reusable += min(hit, request.input_tokens - 1)
    return {
        "requests": prompts,
        "prompt_tokens": prompt_tokens,
        "reusable_tokens": reusable,
        "reusable_share": reusable / prompt_tokens if prompt_tokens else 0.0,
        "distinct_tokens": len(stored) * chunk_tokens,
        "chunk_tokens": chunk_tokens,
    }
