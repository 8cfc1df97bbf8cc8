"""What a prompt finds in the tiers, and other prompts that fill them."""

from __future__ import annotations

from engine import CHUNK, Engine
from prompts import tokens

from lmcache_xpu.harness.client import Answer

CPU_CHUNKS, DISK_CHUNKS = 24, 64


def fill(engine: Engine, seed: object, chunks: int) -> None:
    """Store so many other chunks; those of before go, the oldest first."""
    for number in range(-(-chunks // 8)):
        engine.ask(tokens((seed, number), 8 * CHUNK + 1), max_tokens=1)
    engine.settle()


def counted(engine: Engine, prompt: list[int]) -> tuple[Answer, int, int]:
    """The answer without the engine's own cache, tokens found, and those of them from the disk."""
    engine.forget()
    before = engine.metrics()
    answer = engine.ask(prompt)
    after = engine.metrics()

    def more(name: str) -> int:
        return int(after.sum(name) - before.sum(name))

    assert more("vllm:prompt_tokens_total") == len(prompt)
    from_disk = after.flow("tokens", "load", "disk") - before.flow("tokens", "load", "disk")
    return answer, more("vllm:external_prefix_cache_hits_total"), int(from_disk)


def hit(engine: Engine, prompt: list[int]) -> tuple[int, int]:
    """Tokens found, and how many of them came from the disk."""
    _, hits, from_disk = counted(engine, prompt)
    return hits, from_disk
