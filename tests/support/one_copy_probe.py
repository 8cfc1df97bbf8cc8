"""A real vLLM on CPU with ranks that hold the same: one CPU tier and one disk, and faults.

Run by engine/test_one_copy.py, with MODEL DISK MODE LOADS RANKS HEADS; prints a JSON object last.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from support.probes import end_with
from support.ranks import Case, disk_files, fail, memory, mend, rank, tiers
from support.real_engine import CHUNK, LENGTHS, Engine, prompt

# Chunks of the prompt of each fault.
FAULTS = {"first loses a chunk": 2, "first fails": 3, "second fails": 5, "nothing is lent": 6}


def lose_a_chunk(worker):
    if rank(worker) == 0:
        backend = tiers(worker)["LocalCPUBackend"]
        backend.batched_remove(backend.get_keys()[-1:])
        tiers(worker)["disk"]._store.clear()


fail_first, fail_second = (partial(fail, number=number, move="scatter") for number in range(2))


def fetch_nothing(worker):
    """The first rank has promised chunks, and finds them no more."""

    async def nothing(*args):
        return []

    if rank(worker) == 0:
        for backend in tiers(worker).values():
            backend.batched_get_blocking = lambda keys: [None] * len(keys)
            backend.batched_get_non_blocking = nothing  # layerwise


def fetch_again(worker):
    if rank(worker) == 0:
        for backend in tiers(worker).values():
            del backend.batched_get_blocking, backend.batched_get_non_blocking


def probe(engine: Engine, sources: list[int] | None) -> dict[str, Any]:
    case = Case(engine, sources)
    report: dict[str, Any] = {name: case.hits(length) for name, length in LENGTHS.items()}
    case.compute_only(prompt(2 * CHUNK + 9))  # layerwise, what the disk has is in memory no more
    report["memory"] = engine.llm.collective_rpc(memory)
    report["files"] = engine.llm.collective_rpc(disk_files)
    plants = (lose_a_chunk, None), (fail_first, mend), (fail_second, mend)
    plants += ((fetch_nothing, fetch_again),)
    for (name, chunks), (plant, undo) in zip(FAULTS.items(), plants, strict=True):
        report[name] = case.planted(*case.stored(chunks), plant, undo)
    report["at once"] = at_once(engine)
    return report


def at_once(engine: Engine) -> dict[str, Any]:
    """More prompts than the tiers have room for, again and again, several at a time."""
    prompts = [prompt(6 * CHUNK + 20 + number) for number in range(12)]
    engine.forget()
    computed = [engine.ask(tokens, cache_salt="apart") for tokens in prompts]
    before, right = engine.external_hits(), 0
    for turn in range(6):
        engine.forget()
        asked = [(turn * 5 + number) % len(prompts) for number in range(5)]
        answers = engine.ask_at_once([prompts[number] for number in asked])
        right += sum(
            answer == computed[number] for answer, number in zip(answers, asked, strict=True)
        )
    return {"right": right, "hits": engine.external_hits() - before}


if __name__ == "__main__":
    model, disk, mode, loads, ranks, heads = sys.argv[1:]
    share = int(ranks) // int(heads)  # so many have the same head
    options = {
        "tensor_parallel_size": int(ranks),
        "settings": {"loads": loads, "cpu_gib": 0.06},
    }
    sources = None  # two ranks add alike
    if ranks == "4":
        sources = [number // share * share for number in range(4)]
    end_with(lambda: Engine(model, disk, mode, **options).close_after(probe, sources))
