"""The figures of `bench load`: a table for each load, medians of its repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_xpu.bench.load import Load
from lmcache_xpu.bench.load_runner import LoadResult

__all__ = ["LoadFigures"]

# A column: the words over it, and the figure of one time; None where there were too few values.
Column = tuple[str, Callable[[dict[str, Any]], float | None]]


def _value(name: str, part: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda figures: figures[name][part]


def _times_alone(part: str) -> Callable[[dict[str, Any]], float | None]:
    def ratio(figures: dict[str, Any]) -> float | None:
        alone, beside = figures["alone"][part], figures["with hits"][part]
        return beside / alone if alone and beside else None

    return ratio


DECODING: list[Column] = [
    ("alone p50", _value("alone", "p50")),
    ("p99", _value("alone", "p99")),
    ("with hits p50", _value("with hits", "p50")),
    ("p99", _value("with hits", "p99")),
    ("max", _value("with hits", "max")),
    ("p99, times alone", _times_alone("p99")),
    ("max, times alone", _times_alone("max")),
    ("tokens/s alone", lambda figures: figures["tokens_s alone"]),
    ("with hits", lambda figures: figures["tokens_s with hits"]),
    ("TTFT of hits p50", _value("ttft", "p50")),
    ("max", _value("ttft", "max")),
]
SHARING: list[Column] = [
    ("TTFT, own cache p50", _value("own", "p50")),
    ("max", _value("own", "max")),
    ("all, s", lambda figures: figures["own s"]),
    ("tier p50", lambda figures: figures["tier"]["p50"] if "tier" in figures else None),
    ("max", lambda figures: figures["tier"]["max"] if "tier" in figures else None),
    ("all, s", lambda figures: figures.get("tier s")),
]
CONVERSATIONS: list[Column] = [
    ("requests/s", lambda figures: figures["requests_s"]),
    ("TTFT, first p50", _value("first", "p50")),
    ("later p50", _value("later", "p50")),
    ("p90", _value("later", "p90")),
    ("ITL p50", _value("itl", "p50")),
    ("p99", _value("itl", "p99")),
    ("max", _value("itl", "max")),
]


class LoadFigures:
    """The figures of a run.

    Args:
        load: the loads.
        results: one for each engine.
    """

    def __init__(self, load: Load, results: list[LoadResult]) -> None:
        self.load = load
        self.results = results

    def as_dict(self, machine: dict[str, str], command: str) -> dict[str, Any]:
        """Return all figures, those of each repeat, for a file."""
        return {
            "machine": machine,
            "command": command,
            "shape": self.load.shape.name,
            "decoding": asdict(self.load.decoding),
            "conversations": asdict(self.load.conversations),
            "sharing": asdict(self.load.sharing),
            "results": [asdict(result) for result in self.results],
        }

    def show(self, console: Console) -> None:
        """Print a table for each load, and below them the engines that failed."""
        decoding, users, sharing = self.load.decoding, self.load.conversations, self.load.sharing
        for name, columns, title in (
            (
                "decoding",
                DECODING,
                f"{decoding.requests} requests decode; every {decoding.every_s:g} s one of "
                f"{decoding.hit} tokens arrives. Inter-token latency, ms",
            ),
            (
                "copying",
                DECODING,
                f"The same where the hits compute one token each: {decoding.hit.history} + 1. ms",
            ),
            (
                "storing",
                [(title.replace("hits", "new ones"), look) for title, look in DECODING],
                f"The same where none of the {decoding.hit} tokens is cached: all are computed, "
                "and stored. ms",
            ),
            (
                "conversations",
                CONVERSATIONS,
                f"{users.users} conversations at once: {users.history} tokens, then {users.rounds} "
                f"rounds of {users.new} new ones and {users.answer} of answer. ms",
            ),
            (
                "sharing",
                SHARING,
                f"{sharing.requests} requests at once that share {sharing.history} tokens and have "
                f"{sharing.new} of their own. ms",
            ),
        ):
            if any(result.rounds.get(name) for result in self.results):
                # As a line of its own: a table's title is folded to the table's width.
                console.print(f"[italic]{title}[/italic]", highlight=False)
                console.print(self._table(name, columns))
        for result in self.results:
            if result.error:
                console.print(f"{result.title}: {result.error}", markup=False, highlight=False)

    def plot(self, path: Path) -> None:
        """Draw the others' inter-token latency beside hits, and requests a second."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        latency = "inter-token latency with hits, p99, ms", _value("with hits", "p99")
        bars = {"decoding": latency, "conversations": CONVERSATIONS[0]}
        for axes, (name, (title, look)) in zip(figure.subplots(1, 2), bars.items(), strict=True):
            ran = [result for result in self.results if result.rounds.get(name)]
            heights = [_median(result.rounds[name], look) or 0 for result in ran]
            axes.barh([result.title for result in ran], heights)
            axes.invert_yaxis()
            axes.set_xlabel(title)
        figure.savefig(path, dpi=120)

    def _table(self, name: str, columns: list[Column]) -> Table:
        table = Table(box=None)
        table.add_column("")
        for title, _ in columns:
            table.add_column(title, justify="right")
        for result in self.results:
            if rounds := result.rounds.get(name):
                values = [_median(rounds, look) for _, look in columns]
                cells = ["" if v is None else f"{v:.{0 if v >= 100 else 2}f}" for v in values]
                table.add_row(result.title, *cells)
        return table


def _median(
    rounds: list[dict[str, Any]], look: Callable[[dict[str, Any]], float | None]
) -> float | None:
    values = [value for figures in rounds if (value := look(figures)) is not None]
    return statistics.median(values) if values else None
