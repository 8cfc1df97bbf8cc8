"""Where the steps of a prompt end, so that its states can be hit again.

Layers with states keep one where a step ends at the end of a block, and a prefix can be hit there
alone. vLLM ends a step at a request's `shared_prefix_boundary`. It sets that itself where its own
prefix cache has attention behind the last state. Here it is set to one stop after another:

    junction   the end of the prefix whose attention a cache has, where earlier prompts parted
    question   block ends before the last one: the next prompt may end with another question

The source of the first is Marconi (arXiv:2411.19379), as vLLM names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["StateStops"]

# What a question may have, with an answer or a template before it; at least one block is left out.
QUESTION_TOKENS = 256
LEAST_TOKENS = 128  # of a step that ends for it: a step takes as long with fewer


class StateStops:
    """Called by the scheduler's thread.

    Args:
        block_tokens: tokens of a block, which is as large in all KV cache groups.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._stops: dict[str, list[int]] = {}  # by request, the next one last

    def begin(self, request: Request, start: int, shared: int) -> None:
        """Choose the stops of a request that may be scheduled next.

        Args:
            request: vLLM's, with the stop that vLLM has chosen, if any.
            start: tokens that are not computed.
            shared: tokens of its prefix whose attention a cache has.
        """
        size = self._block_tokens
        last = request.num_prompt_tokens // size * size
        step = -(-LEAST_TOKENS // size) * size
        question = range(last - max(1, QUESTION_TOKENS // step) * step, last, step)
        stops = {request.shared_prefix_boundary, shared, *question}
        self._stops[request.request_id] = sorted(stops, reverse=True)
        self.go_on(request, start)

    def go_on(self, request: Request, computed: int) -> None:
        """Set the stop of a request's next step, before which so many tokens are computed."""
        stops = self._stops.get(request.request_id, [])
        while stops and stops[-1] <= computed:
            stops.pop()
        if stops:
            request.shared_prefix_boundary = stops[-1]

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._stops.pop(request_id, None)
