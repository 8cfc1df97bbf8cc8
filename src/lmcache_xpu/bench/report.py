"""The figures of a run: tables, and the content of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_xpu.bench.runner import Result
from lmcache_xpu.bench.shapes import Shape


class EngineFigures:
    """The figures of `bench engine`, and what they are compared with.

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
        self.rows = list(dict.fromkeys(row for result in results for row in result.rounds))
        self._none = next((r for r in results if r.variant == "none" and r.rounds), None)

    def limit_ms(self, row: str) -> float | None:
        """Return the least that a hit can cost; None if it was not measured."""
        if self._none is None or row not in self._none.rounds:
            return None
        prefix_ms = self._none.medians[row]["own prefix"]
        if self.shape.rows[row].new:
            return prefix_ms
        size = self._tokens(row) * self.shape.model.kv_bytes_per_token
        return prefix_ms + size / self._none.link_gb_s["load"] / 1e6

    def hit_ratio(self, result: Result, row: str) -> float | None:
        """Return a hit in the tier over its limit; None if one of them was not measured."""
        limit, tier = self.limit_ms(row), result.medians.get(row, {}).get("tier")
        return tier / limit if limit and tier else None

    def store_ratio(self, result: Result, row: str) -> float | None:
        """Return recomputing while storing over recomputing without a connector."""
        if self._none is None or result is self._none:
            return None
        plain = self._none.medians.get(row, {}).get("recompute")
        storing = result.medians.get(row, {}).get("recompute")
        return storing / plain if plain and storing else None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for a file."""
        results = []
        for result in self.results:
            facts = asdict(result) | {
                "ms": result.medians,
                "tokens": {row: self._tokens(row) for row in result.rounds},
                "hit_over_limit": {row: self.hit_ratio(result, row) for row in self.rows},
                "store_over_recompute": {row: self.store_ratio(result, row) for row in self.rows},
            }
            del facts["rounds"]
            results.append(facts)
        limits = {row: self.limit_ms(row) for row in self.rows}
        return {"shape": self.shape.name, "limits_ms": limits, "results": results}

    def show(self, console: Console) -> None:
        """Print the tables, and below them what hits restored and which engines failed."""
        self._print(console, "Hit in the tier, ms (and over its limit)", "tier", self.hit_ratio)
        title = "Recompute while storing, ms (and over recomputing alone)"
        self._print(console, title, "recompute", self.store_ratio)
        self._print(console, "The engine's own prefix hit, ms", "own prefix")
        title = "A fixed piece of Python meanwhile, ms: how fast the host was"
        self._print(console, title, "python", digits=2)
        for result in self.results:
            if result.exact is not None:
                mark = "" if result.exact == 1 else "NOT EXACT, "
                share = f"{mark}{result.exact:.2%} of the blocks are the same, to the byte"
                console.print(f"{result.title}: {share}", highlight=False)
        _print_errors(console, self.results)

    def _tokens(self, row: str) -> int:
        """Return the number of cached tokens of all prompts of a row."""
        return self.shape.rows[row].history * self.shape.rows[row].count

    def _print(
        self,
        console: Console,
        title: str,
        source: str,
        ratio: Callable[[Result, str], float | None] = lambda *_: None,
        digits: int = 1,
    ) -> None:
        """Print the milliseconds of a source: a line for each engine, a column for each row."""
        ms = {result.title: result.medians for result in self.results}
        rows = [row for row in self.rows if any(source in e.get(row, {}) for e in ms.values())]
        lines: dict[str, list[str]] = {}
        if source == "tier":
            limits = [self.limit_ms(row) for row in rows]
            lines["limit"] = ["" if limit is None else f"{limit:.1f}" for limit in limits]
        for result in self.results:
            cells = []
            for row in rows:
                value, over = ms[result.title].get(row, {}).get(source), ratio(result, row)
                cell = "" if value is None else f"{value:.{digits}f}"
                cells.append(cell if over is None or not cell else f"{cell} ({over:.2f})")
            if any(cells):
                lines[result.title] = cells
        _print_table(console, title, rows, lines)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of `bench load`.

    Args:
        shape: the model's shape, and its loads.
        results: one for each engine.
    """

    shape: Shape
    results: list[Result]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, those of each repeat, for a file."""
        names = ("variant", "title", "error", "seconds", "rounds")
        return {
            "shape": self.shape.name,
            "loads": {name: asdict(load) for name, load in self.shape.loads.items()},
            "results": [{name: getattr(r, name) for name in names} for r in self.results],
        }

    def show(self, console: Console) -> None:
        """Print a table of medians for each load, and below them the engines that failed."""
        for name, load in self.shape.loads.items():
            medians = {r.title: r.medians[name] for r in self.results if name in r.rounds}
            columns = list(dict.fromkeys(key for line in medians.values() for key in line))
            lines = {
                title: [f"{line[key]:.4g}" if key in line else "" for key in columns]
                for title, line in medians.items()
            }
            if lines:
                _print_table(console, str(load), columns, lines)
        _print_errors(console, self.results)


def _print_table(
    console: Console, title: str, columns: Sequence[str], lines: Mapping[str, Sequence[str]]
) -> None:
    # The title is a line of its own: a table's is folded to the table's width.
    console.print(f"[italic]{title}[/italic]", highlight=False)
    table = Table(box=None)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in lines.items():
        table.add_row(name, *cells)
    console.print(table)


def _print_errors(console: Console, results: Sequence[Result]) -> None:
    for result in results:
        if result.error:
            console.print(f"{result.title}: {result.error}", markup=False, highlight=False)
