"""The loads in each engine, several times; one that fails is a result with an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from lmcache_xpu.bench.load import Load
from lmcache_xpu.bench.runner import EngineResult, Questions, started
from lmcache_xpu.bench.variants import Variant

__all__ = ["LoadResult", "run"]


@dataclass(slots=True)
class LoadResult(EngineResult):
    """The figures of one engine.

    Args:
        rounds: load -> the figures of each time, see `load_jobs`.
    """

    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def run(
    load: Load,
    engines: list[Variant],
    *,
    repeats: int,
    only: Sequence[str] = (),
    in_turn: bool,
    graphs: bool,
    timeout_s: float,
    console: Console,
    save: Callable[[list[LoadResult]], None] = lambda _: None,
) -> list[LoadResult]:
    """Measure engines.

    Args:
        load: the loads.
        engines: the engines' variants.
        repeats: of each load.
        only: names of loads; all of them without any.
        in_turn: see `runner.started`.
        graphs: whether vLLM compiles graphs.
        timeout_s: seconds that an engine may take to start, and for each load.
        console: where the progress is shown.
        save: called with all results so far after each load.
    """
    results: list[LoadResult] = []
    jobs = {name: job for name, job in load.jobs().items() if not only or name in only}
    questions = Questions(console)
    groups = started(load.shape, engines, in_turn=in_turn, graphs=graphs, timeout_s=timeout_s)
    for children in groups:
        pairs = [(LoadResult(child.variant.name, child.variant.title), child) for child in children]
        results += [result for result, _ in pairs]
        for result, child in pairs:
            questions.ask(result, child, "start", {"warm up": load.shape.lengths[0]})
        for _ in range(repeats):
            for name, job in jobs.items():
                for result, child in pairs:
                    answer = questions.ask(result, child, name, job)
                    if "load" in answer:
                        result.rounds.setdefault(name, []).append(answer["load"])
                save(results)
        for result, _ in pairs:
            questions.end(result)
    return results
