"""The figures of a run: tables, and the content of a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_xpu.bench.jobs import Figures, Prompts
from lmcache_xpu.bench.runner import Result
from lmcache_xpu.bench.shapes import Shape


class Report:
    """The figures of all engines, and what those of prompts are compared with.

    The limit of a hit is the engine's own prefix hit without a connector, plus the time of a raw
    copy of its bytes. The limit of a later turn is that prefix hit alone, because the copy can hide
    behind the computing.
    """

    def __init__(self, shape: Shape, results: list[Result]) -> None:
        self.shape, self.results = shape, results
        self._plain = next((r for r in results if r.variant == "none" and r.rounds), None)

    def figures(self, result: Result, name: str) -> Figures:
        """Return an engine's medians for a request, of prompts with their limit and ratios."""
        figures = dict(result.medians.get(name, {}))
        request = self.shape.requests[name]
        plain = self._plain.medians.get(name) if self._plain else None
        if self._plain is None or plain is None or not isinstance(request, Prompts):
            return figures
        if "tier" in figures:
            limit = plain["own prefix"]
            if not request.new:
                size = request.history * request.count * self.shape.model.kv_bytes_per_token
                limit += size / self._plain.link_gb_s["load"] / 1e6
            figures |= {"limit": limit, "tier / limit": figures["tier"] / limit}
        if "recompute" in figures and result is not self._plain:
            figures["recompute / alone"] = figures["recompute"] / plain["recompute"]
        return figures

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, those of each repeat and their medians, for a file."""
        names = self.shape.requests
        return {
            "shape": self.shape.name,
            "requests": {name: asdict(request) for name, request in names.items()},
            "results": [
                asdict(r) | {"medians": {n: self.figures(r, n) for n in names if n in r.rounds}}
                for r in self.results
            ],
        }

    def show(self, console: Console) -> None:
        """Print a table of medians for each request, what hits restored, and failed engines."""
        for name, request in self.shape.requests.items():
            lines = {r.title: self.figures(r, name) for r in self.results if name in r.rounds}
            columns = list(dict.fromkeys(column for line in lines.values() for column in line))
            if lines:
                # The title is a line of its own: a table's is folded to the table's width.
                console.print(f"[italic]{request.title}[/italic]", highlight=False)
                table = Table("", box=None)
                for column in columns:
                    table.add_column(column, justify="right")
                for title, line in lines.items():
                    cells = (f"{line[key]:.4g}" if key in line else "" for key in columns)
                    table.add_row(title, *cells)
                console.print(table)
        for result in self.results:
            if result.exact is not None:
                mark = "" if result.exact == 1 else "NOT EXACT, "
                share = f"{mark}{result.exact:.2%} of the blocks are the same, to the byte"
                console.print(f"{result.title}: {share}", highlight=False)
            if result.error:
                console.print(f"{result.title}: {result.error}", markup=False, highlight=False)
