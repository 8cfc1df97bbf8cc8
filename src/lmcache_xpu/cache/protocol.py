"""What a cache is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TokenRange"]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Whole chunks of a request, to be looked up, loaded or stored.

    Args:
        request_id: ID of the request.
        tokens: all of the request, as LMCache's keys have them.
        start: first token of the range.
        end: the one after the last.
        salt: what sets the request's KV apart beside its tokens; see `keys`.
        options: LMCache's options of the request.
        blocks: by KV cache group of vLLM, block IDs of the range.
        kept: leading tokens of the range that vLLM's own prefix cache has; a load leaves them out.
    """

    request_id: str
    tokens: Any
    start: int
    end: int
    salt: str = ""
    options: dict[str, Any] | None = None
    blocks: Sequence[Sequence[int]] = ()
    kept: int = 0
