"""The figures of a run: tables, a plot, and one file to send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lmcache_xpu.bench.runner import Result
from lmcache_xpu.bench.shapes import Shape


class Figures:
    """The figures of a run, and what they are compared with.

    The limit of a hit is the engine's own prefix hit without a connector, plus the time of a raw
    copy of its bytes. The limit of a later turn is that prefix hit alone, because the copy can hide
    behind the computing.

    Args:
        shape: the model's shape.
        results: one for each engine.
    """

    def __init__(self, shape: Shape, results: list[Result]) -> None:
        self.shape = shape
        self.results = results
        self._none = next((r for r in results if r.variant == "none" and r.ms), None)

    @property
    def rows(self) -> list[str]:
        """The requests, in the order in which they were timed."""
        return list(dict.fromkeys(row for result in self.results for row in result.ms))

    def limit_ms(self, row: str) -> float | None:
        """Return the least that a hit can cost; None if it was not measured."""
        if self._none is None or row not in self._none.ms:
            return None
        prefix_ms = self._none.ms[row]["own prefix"]
        if "+" in row:
            return prefix_ms
        size = self._none.tokens[row] * self.shape.model.kv_bytes_per_token
        return prefix_ms + size / self._none.link_gb_s["load"] / 1e6

    def hit_ratio(self, result: Result, row: str) -> float | None:
        """Return a hit in the tier over its limit; None if one of them was not measured."""
        limit, tier = self.limit_ms(row), result.ms.get(row, {}).get("tier")
        return tier / limit if limit and tier else None

    def store_ratio(self, result: Result, row: str) -> float | None:
        """Return recomputing while storing over recomputing without a connector."""
        if self._none is None or result is self._none:
            return None
        plain = self._none.ms.get(row, {}).get("recompute")
        storing = result.ms.get(row, {}).get("recompute")
        return storing / plain if plain and storing else None

    def as_dict(self, machine: dict[str, str], command: str) -> dict[str, Any]:
        """Return all figures, for a file."""
        return {
            "machine": machine,
            "command": command,
            "shape": self.shape.name,
            "limits_ms": {row: self.limit_ms(row) for row in self.rows},
            "results": [
                asdict(result)
                | {
                    "hit_over_limit": {row: self.hit_ratio(result, row) for row in self.rows},
                    "store_over_recompute": {
                        row: self.store_ratio(result, row) for row in self.rows
                    },
                }
                for result in self.results
            ],
        }

    def show(self, console: Console) -> None:
        """Print the tables, and below them the engines that failed or restored other bytes."""
        for question in (
            _Question("Hit in the tier, ms (and over its limit)", "tier", self.hit_ratio),
            _Question(
                "Recompute while storing, ms (and over recomputing alone)",
                "recompute",
                self.store_ratio,
            ),
            _Question("The engine's own prefix hit, ms", "own prefix"),
            _Question(
                "A fixed piece of Python meanwhile, ms: how fast the host was", "python", digits=2
            ),
        ):
            # As a line of its own: a table's title is folded to the table's width.
            console.print(f"[italic]{question.title}[/italic]", highlight=False)
            console.print(_table(self, question))
        for result in self.results:
            if result.exact is not None and result.exact < 1:
                console.print(
                    f"{result.title}: NOT EXACT, {result.exact:.4f} of the blocks restored"
                )
            if result.error:
                console.print(f"{result.title}: {result.error}", markup=False, highlight=False)

    def plot(self, path: Path) -> None:
        """Draw the hits beside their limits."""
        from matplotlib.figure import Figure

        rows = [row for row in self.rows if self.limit_ms(row) is not None]
        results = [r for r in self.results if any("tier" in r.ms.get(row, {}) for row in rows)]
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / max(1, len(results))
        for number, result in enumerate(results):
            heights = [self.hit_ratio(result, row) or 0 for row in rows]
            places = [at + (number - (len(results) - 1) / 2) * width for at in range(len(rows))]
            exact = result.exact is None or result.exact == 1
            label = result.title if exact else f"{result.title} (not exact)"
            axes.bar(places, heights, width, label=label, hatch=None if exact else "//")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(rows)), [row.replace(" (", "\n(") for row in rows])
        axes.set_xlabel("tokens of the request: cached, or cached + new")
        axes.set_ylabel("time to first token of a hit over its limit")
        axes.set_title("A hit in the CPU tier; 1 is the least that it can cost")
        if results:  # the first rows may have no hits
            axes.legend(ncols=2, fontsize="small")
        figure.savefig(path, dpi=120)


class _Question(NamedTuple):
    """One table: a row for each engine, a column for each row of the figures."""

    title: str
    source: str
    ratio: Callable[[Result, str], float | None] | None = None
    digits: int = 1


def _table(figures: Figures, question: _Question) -> Table:
    rows = [
        row
        for row in figures.rows
        if any(question.source in result.ms.get(row, {}) for result in figures.results)
    ]
    table = Table(box=None)
    table.add_column("")
    for row in rows:
        table.add_column(row, justify="right")
    if question.source == "tier":
        limits = [figures.limit_ms(row) for row in rows]
        table.add_row("limit", *("" if ms is None else f"{ms:.1f}" for ms in limits))
    for result in figures.results:
        cells = [_cell(result, row, question) for row in rows]
        if any(cells):
            table.add_row(result.title, *cells)
    return table


def _cell(result: Result, row: str, question: _Question) -> str:
    ms = result.ms.get(row, {}).get(question.source)
    if ms is None:
        return ""
    ratio = question.ratio(result, row) if question.ratio else None
    note = "" if ratio is None else f" ({ratio:.2f})"
    return f"{ms:.{question.digits}f}{note}"
