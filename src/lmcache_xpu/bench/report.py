"""The figures of a run: tables, a plot, and the content of a file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lmcache_xpu.bench.load import Load
from lmcache_xpu.bench.runner import Result
from lmcache_xpu.bench.shapes import Shape

__all__ = ["Figures", "LoadFigures", "Page"]


class Figures:
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
        self._none = next((r for r in results if r.variant == "none" and r.rounds), None)

    @property
    def rows(self) -> list[str]:
        """The requests, in the order in which they were timed."""
        return list(dict.fromkeys(row for result in self.results for row in result.rounds))

    def limit_ms(self, row: str) -> float | None:
        """Return the least that a hit can cost; None if it was not measured."""
        if self._none is None or row not in self._none.rounds:
            return None
        prefix_ms = self._none.ms[row]["own prefix"]
        if "+" in row:
            return prefix_ms
        size = self.shape.cached_tokens(row) * self.shape.model.kv_bytes_per_token
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
        results = []
        for result in self.results:
            facts = asdict(result) | {
                "ms": result.ms,
                "tokens": {row: self.shape.cached_tokens(row) for row in result.rounds},
                "hit_over_limit": {row: self.hit_ratio(result, row) for row in self.rows},
                "store_over_recompute": {row: self.store_ratio(result, row) for row in self.rows},
            }
            del facts["rounds"]
            results.append(facts)
        return {
            "machine": machine,
            "command": command,
            "shape": self.shape.name,
            "limits_ms": {row: self.limit_ms(row) for row in self.rows},
            "results": results,
        }

    def show(self, console: Console) -> None:
        """Print the tables, and below them the engines that failed or restored other bytes."""
        self._print(console, "Hit in the tier, ms (and over its limit)", "tier", self.hit_ratio)
        title = "Recompute while storing, ms (and over recomputing alone)"
        self._print(console, title, "recompute", self.store_ratio)
        self._print(console, "The engine's own prefix hit, ms", "own prefix")
        title = "A fixed piece of Python meanwhile, ms: how fast the host was"
        self._print(console, title, "python", digits=2)
        for result in self.results:
            if result.exact is not None and result.exact < 1:
                console.print(
                    f"{result.title}: NOT EXACT, {result.exact:.4f} of the blocks restored"
                )
        _print_errors(console, self.results)

    def _print(
        self,
        console: Console,
        title: str,
        source: str,
        ratio: Callable[[Result, str], float | None] = lambda *_: None,
        digits: int = 1,
    ) -> None:
        """Print the milliseconds of a source: a line for each engine, a column for each row."""
        ms = {result.title: result.ms for result in self.results}
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


class Column(NamedTuple):
    """A column of a load's table: the words over it, and the path of its figure.

    With `over` it is the ratio of two figures.
    """

    title: str
    figure: str
    over: str = ""


DECODING = (
    Column("alone p50", "alone.p50"),
    Column("p99", "alone.p99"),
    Column("with hits p50", "with hits.p50"),
    Column("p99", "with hits.p99"),
    Column("max", "with hits.max"),
    Column("p99, times alone", "with hits.p99", over="alone.p99"),
    Column("max, times alone", "with hits.max", over="alone.max"),
    Column("tokens/s alone", "tokens_s alone"),
    Column("with hits", "tokens_s with hits"),
    Column("TTFT of hits p50", "ttft.p50"),
    Column("max", "ttft.max"),
)
STORING = tuple(c._replace(title=c.title.replace("hits", "new ones")) for c in DECODING)
SHARING = (
    Column("TTFT, own cache p50", "own.p50"),
    Column("max", "own.max"),
    Column("all, s", "own s"),
    Column("tier p50", "tier.p50"),
    Column("max", "tier.max"),
    Column("all, s", "tier s"),
)
CONVERSATIONS = (
    Column("requests/s", "requests_s"),
    Column("TTFT, first p50", "first.p50"),
    Column("later p50", "later.p50"),
    Column("p90", "later.p90"),
    Column("ITL p50", "itl.p50"),
    Column("p99", "itl.p99"),
    Column("max", "itl.max"),
)
TABLES = {
    "decoding": DECODING,
    "copying": DECODING,
    "storing": STORING,
    "conversations": CONVERSATIONS,
    "sharing": SHARING,
}


class LoadFigures:
    """The figures of `bench load`.

    Args:
        load: the loads.
        results: one for each engine.
    """

    def __init__(self, load: Load, results: list[Result]) -> None:
        self.load = load
        self.results = results

    def as_dict(self, machine: dict[str, str], command: str) -> dict[str, Any]:
        """Return all figures, those of each repeat, for a file."""
        names = ("variant", "title", "error", "seconds", "rounds")
        return {
            "machine": machine,
            "command": command,
            "shape": self.load.shape.name,
            "decoding": asdict(self.load.decoding),
            "conversations": asdict(self.load.conversations),
            "sharing": asdict(self.load.sharing),
            "results": [{name: getattr(r, name) for name in names} for r in self.results],
        }

    def show(self, console: Console) -> None:
        """Print a table of medians for each load, and below them the engines that failed."""
        decoding, talk, sharing = self.load.decoding, self.load.conversations, self.load.sharing
        titles = {
            "decoding": f"{decoding.requests} requests decode; every {decoding.every_s:g} s one of "
            f"{decoding.hit} tokens arrives. Inter-token latency, ms",
            "copying": "The same where the hits compute one token each: "
            f"{decoding.hit.history} + 1. ms",
            "storing": f"The same where none of the {decoding.hit} tokens is cached: all are "
            "computed, and stored. ms",
            "conversations": f"{talk.users} conversations at once: {talk.history} tokens, then "
            f"{talk.rounds} rounds of {talk.new} new ones and {talk.answer} of answer. ms",
            "sharing": f"{sharing.requests} requests at once that share {sharing.history} tokens "
            f"and have {sharing.new} of their own. ms",
        }
        for name, columns in TABLES.items():
            lines = {}
            for result in self.results:
                if rounds := result.rounds.get(name):
                    values = [_median(rounds, column) for column in columns]
                    cells = ["" if v is None else f"{v:.{0 if v >= 100 else 2}f}" for v in values]
                    lines[result.title] = cells
            if lines:
                headings = [column.title for column in columns]
                _print_table(console, titles[name], headings, lines)
        _print_errors(console, self.results)

    def plot(self, path: Path) -> None:
        """Draw the others' inter-token latency beside hits, and requests a second."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        latency = Column("inter-token latency with hits, p99, ms", "with hits.p99")
        bars = {"decoding": latency, "conversations": CONVERSATIONS[0]}
        for axes, (name, column) in zip(figure.subplots(1, 2), bars.items(), strict=True):
            ran = [result for result in self.results if result.rounds.get(name)]
            heights = [_median(result.rounds[name], column) or 0 for result in ran]
            axes.barh([result.title for result in ran], heights)
            axes.invert_yaxis()
            axes.set_xlabel(column.title)
        figure.savefig(path, dpi=120)


Page = Figures | LoadFigures


def _median(rounds: Sequence[Mapping[str, Any]], column: Column) -> float | None:
    values = []
    for figures in rounds:
        value = _figure(figures, column.figure)
        if column.over and value is not None:
            base = _figure(figures, column.over)
            value = value / base if base else None
        if value is not None:
            values.append(value)
    return statistics.median(values) if values else None


def _figure(figures: Mapping[str, Any], path: str) -> float | None:
    """Return a figure of one time; None where there were too few values, or no tier."""
    name, _, part = path.partition(".")
    value = figures.get(name)
    return value.get(part) if isinstance(value, Mapping) else value


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
