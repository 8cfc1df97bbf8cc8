"""Requests of an engine that the fuzzer runs, and what is stored of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from lmcache_xpu.cache.protocol import TokenRange
    from lmcache_xpu.copies.transfer_queue import Transfer

LONGEST = 14  # tokens of a prompt


@dataclass(frozen=True)
class Prompt:
    """A request to come.

    kept: leading blocks that the engine may have itself. waits: it is in no step until its chunks
    are loaded. stays: it runs on.
    """

    content: int
    tokens: int
    kept: int
    waits: bool
    stays: bool


prompts = st.builds(
    Prompt,
    content=st.integers(0, 2),
    tokens=st.integers(1, LONGEST),
    kept=st.sampled_from((0, 0, 1, 2)),
    waits=st.sampled_from((False, False, True)),
    stays=st.booleans(),
)


@dataclass(eq=False)
class Running:
    """A request that has blocks.

    cached: leading tokens that the engine had. loaded: those that it has after the load; the rest
    is computed. load: what it loads. transfer: of a load that it waits for. failures: of the
    device, before.
    """

    name: str
    prompt: Prompt
    keys: object
    blocks: list[int]
    tokens: int
    cached: int
    loaded: int
    load: TokenRange | None = None
    transfer: Transfer | None = None
    failures: int = 0
    lost: bool = False


@dataclass(eq=False)
class Storing:
    """Chunks on their way to the cache.

    chunks: by number, the bytes that they must have in each KV cache group. keys: by which the
    store is known. committed: those that were published. spoiled: the request's load has failed.
    """

    of: Running
    chunks: dict[int, list[bytes]]
    keys: object = None
    committed: list[int] = field(default_factory=list)
    spoiled: bool = False
