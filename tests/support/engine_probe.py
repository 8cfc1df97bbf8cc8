"""A real vLLM on CPU with a cache in its process: many requests at once, and tiers that lose parts.

Run by engine/test_engine.py, with the arguments STEP MODEL DISK. The step `memory` has memory for
all prompts, and the step `tiers` for a few chunks, and a disk; the step `broken` has a disk tier
that can't be opened. Each prints a JSON object last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from support.engine_tiers import (
    SALTS,
    Lookups,
    full_disk,
    full_memory,
    locks,
    longer_than_memory,
    memory_use,
    parts,
    recompute,
    settle,
)
from support.probes import end_with
from support.real_engine import BLOCK, CHUNK, KV_HEADS, LENGTHS, Engine, hit, prompt, restored
from support.server_workers import counted, ways

CROWD = 16  # prompts at once
NEW = [900, 77, 600, 1300]  # tokens behind a history: most are computed in several steps
# Of a conversation: tokens of each question.
QUESTIONS = [600, 90, 333, 128, 511, 7]
SMALL_GIB = 0.012  # of 12 chunks
WHOLE = 4 * CHUNK + 60
OWN_BLOCKS = (1, 2, 3, 5, 7)  # that vLLM's own cache has of a prompt


def turn(length: int) -> list[int]:
    """A history that all turns share, and what is new."""
    return prompt(4 * CHUNK + 1)[:-1] + prompt(length)


def crowd(engine: Engine) -> dict[str, Any]:
    """More prompts at once than the engine's cache holds, some of them twice."""
    # Each needs one more block when it has answered a few tokens; there are none, so some are
    # preempted and loaded again.
    prompts = [prompt((6 + at % 8) * BLOCK - 6 - at // 8) for at in range(CROWD)]
    alone = []
    for tokens in prompts:
        engine.forget()
        alone.append(engine.ask(tokens))
    rounds = []
    for order in (1, -1):
        settle(engine)
        engine.forget()
        hits, preempted = engine.external_hits(), engine.counter("num_preemptions")
        asked = [*range(CROWD), *range(0, CROWD, 5)][::order]
        answers = engine.ask_at_once([prompts[number] for number in asked])
        rounds.append(
            {
                "right": [answers[at] == alone[number] for at, number in enumerate(asked)],
                "hit": engine.external_hits() - hits,
                "preempted": engine.counter("num_preemptions") - preempted,
            }
        )
    return {"tokens": sum(map(len, prompts)), "rounds": rounds}


def stumble(engine: Engine) -> dict[str, Any]:
    """Turns at once, some of whose loads fail; and what is found of them afterwards."""
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    prompts = [turn(length) for length in NEW]
    engine.forget()
    engine.ask(turn(0))  # what the turns load
    settle(engine)
    scatter, calls = TorchTransfer.scatter, []

    def stumbling(self, *args):
        calls.append(len(calls) % 5 == 0)
        if calls[-1]:
            raise RuntimeError("planted")
        scatter(self, *args)

    engine.forget()
    hits = engine.external_hits()
    TorchTransfer.scatter = stumbling
    failing = engine.ask_at_once(prompts)
    settle(engine)
    TorchTransfer.scatter = scatter
    hits = engine.external_hits() - hits
    afterwards = []
    for tokens in prompts:
        engine.forget()
        afterwards.append(engine.ask(tokens))
    return {
        "failed": sum(calls),
        "hit": hits,
        "failing": failing,
        "afterwards": afterwards,
        "cold": [recompute(engine, tokens) for tokens in prompts],
    }


def faults(engine: Engine) -> dict[str, Any]:
    """Hits whose loads write the wrong thing, or fail."""
    from lmcache_xpu.transfer.gather_scatter import TorchTransfer

    scatter = TorchTransfer.scatter

    def shifted(self, rows, source, first_layer=0):
        # One block further: opaque blocks are rows.
        scatter(self, rows._replace(engine=rows.engine + 1), source, first_layer)

    def without_values(self, rows, source, first_layer=0):
        source = source.clone()
        # A block of vLLM's CPU attention: per head the keys of all its tokens, then the values.
        source.unflatten(-1, (KV_HEADS, 2, -1))[..., 1, :].zero_()
        scatter(self, rows, source, first_layer)

    def failing(self, rows, source, first_layer=0):
        raise RuntimeError("planted")

    report: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        engine.forget()
        tokens = prompt(length)
        seen: dict[str, Any] = {"recompute": engine.ask(tokens)}
        cold = engine.blocks()
        settle(engine)
        planted = {"sound": scatter, "shifted": shifted, "without values": without_values}
        for fault, broken in {**planted, "failing": failing}.items():
            TorchTransfer.scatter = broken
            seen[fault] = hit(engine, tokens, cold)
            settle(engine)
            TorchTransfer.scatter = scatter
        report[name] = seen
    return report


def conversation(engine: Engine, keep: Callable[[int], bool]) -> list[dict[str, Any]]:
    """Turns that each go on with the answer to the one before, in lengths of no chunk.

    Args:
        engine: that is asked.
        keep: whether vLLM's own cache is kept before a turn, by its number.
    """
    tokens: list[int] = prompt(50 + next(SALTS))[:50]
    turns = []
    for number, length in enumerate(QUESTIONS):
        tokens = [*tokens, *prompt(length)]
        if not keep(number):
            engine.forget()
        hits, own = engine.external_hits(), engine.counter("prefix_cache_hits")
        answer = engine.ask(tokens)
        turns.append(
            {
                "tokens": list(tokens),
                "answer": answer,
                "hit": engine.external_hits() - hits,
                "own": engine.counter("prefix_cache_hits") - own,
            }
        )
        tokens = [*tokens, *answer]
        settle(engine)
    for seen in turns:
        tokens = seen.pop("tokens")
        seen["right"] = recompute(engine, tokens) == seen.pop("answer")
        seen["length"] = len(tokens)
    return turns


def beginnings(engine: Engine) -> list[dict[str, Any]]:
    """Prompts of which vLLM's own cache has a beginning of some blocks, and the tiers more."""
    tokens = prompt(WHOLE)
    engine.forget()
    answer = engine.ask(tokens)
    cold = engine.blocks()
    report = []
    for blocks in OWN_BLOCKS:
        settle(engine)
        engine.forget()
        engine.ask(tokens[: blocks * BLOCK])
        settle(engine)
        hits, own = engine.external_hits(), engine.counter("prefix_cache_hits")
        report.append(
            {
                "right": engine.ask(tokens) == answer,
                "own": engine.counter("prefix_cache_hits") - own,
                "hit": engine.external_hits() - hits,
                "restored": restored(cold, engine.blocks()),
            }
        )
    return report


def at_last(engine: Engine) -> dict[str, Any]:
    """What is left when nobody asks, and after a reset."""
    settle(engine)
    report = {
        "locks": engine.llm.collective_rpc(locks)[0],
        "errors": engine.llm.collective_rpc(counted)[0],
        "ways": engine.llm.collective_rpc(ways)[0],
    }
    report["reset"] = engine.llm.reset_prefix_cache(reset_connector=True)
    report["used"], report["room"] = engine.llm.collective_rpc(memory_use)[0]
    return report


def with_memory(engine: Engine) -> dict[str, Any]:
    return {
        "prompts": faults(engine),
        "stumbled": stumble(engine),
        "conversations": {
            "forgotten": conversation(engine, keep=lambda number: False),
            "kept": conversation(engine, keep=lambda number: True),
            "by turns": conversation(engine, keep=lambda number: number % 2 > 0),
        },
        "beginnings": beginnings(engine),
        "crowd": crowd(engine),
        "last": at_last(engine),
    }


def with_tiers(engine: Engine) -> dict[str, Any]:
    seen = Lookups()
    return {
        "parts": parts(engine, seen),
        "full disk": full_disk(engine),
        "full memory": full_memory(engine),
        "longer": longer_than_memory(engine),
        "conversation": conversation(engine, keep=lambda number: False),
        "crowd": crowd(engine),
        "last": at_last(engine),
    }


def main(step: str, model: str, disk: str) -> dict[str, Any]:
    if step == "memory":
        return Engine(model, None, "standard").close_after(with_memory)
    settings = {"cpu_gib": SMALL_GIB}
    return Engine(model, disk, "standard", settings=settings).close_after(with_tiers)


if __name__ == "__main__":
    end_with(lambda: main(*sys.argv[1:]))
