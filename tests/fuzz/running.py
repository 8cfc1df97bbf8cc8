"""Requests of an engine that the fuzzer runs, and what is stored of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st


@dataclass(frozen=True)
class Prompt:
    """A request to come."""

    content: int
    tokens: int
    kept: int  # leading blocks that the engine may have itself
    early: bool
    stays: bool


prompts = st.builds(
    Prompt,
    content=st.integers(0, 1),
    tokens=st.integers(1, 14),
    kept=st.sampled_from((0, 0, 1, 2)),
    early=st.booleans(),
    stays=st.booleans(),
)


@dataclass(eq=False)
class Running:
    """A request that has blocks."""

    prompt: Prompt
    blocks: list[int]
    tokens: int
    cached: int  # leading tokens that the engine had
    loaded: int  # leading tokens that it has after the load; the rest is computed
    chunks: list[tuple[int, int]] = field(default_factory=list)  # that are loaded
    objs: list[list] = field(default_factory=list)  # [group][chunk]
    lost: bool = False

    def slots(self, block_tokens: int) -> list[int]:
        every = [block * block_tokens + n for block in self.blocks for n in range(block_tokens)]
        return every[: self.tokens]


@dataclass(eq=False)
class Storing:
    """Chunks on their way to LMCache."""

    of: Running
    keys: list[tuple[int, int]]
    objs: list[list]  # [group][chunk]
    put: set[int] = field(default_factory=set)  # groups
    decided: bool = False  # whether they were computed from what was there
    failed: bool = False
