"""Loads beside steps that other requests wait for: who begins alike takes the same blocks.

begin   a request has its blocks, and waits until they are filled
shares  another one lacks such a block first: it is asked for again later
end     vLLM has heard of the load: what has arrived is in its own prefix cache
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["SharedLoads"]


class _Load(NamedTuple):
    request: Request
    tokens: range  # that it fills


class SharedLoads:
    """The loads that requests of one scheduler wait for."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    def begin(self, request: Request, start: int, end: int) -> None:
        """Hear of a load that fills the blocks of these tokens."""
        self._loads[request.request_id] = _Load(request, range(start, end))

    def end(self, request_id: str) -> None:
        """Forget a request's load, if there is one."""
        self._loads.pop(request_id, None)

    def shares(self, request: Request, kept: int, block_tokens: int) -> bool:
        """Whether another request's load fills the block that this one lacks first.

        Args:
            request: that waits for no load yet.
            kept: tokens that vLLM's own prefix cache has of it, whole blocks.
            block_tokens: tokens of a block that vLLM hashes.
        """
        if not self._loads:
            return False
        block, hashes = kept // block_tokens, request.block_hashes
        return block < len(hashes) and any(
            kept in load.tokens and load.request.block_hashes[block] == hashes[block]
            for load in self._loads.values()
        )
