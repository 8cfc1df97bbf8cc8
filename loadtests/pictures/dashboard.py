"""The Grafana dashboard as its file describes it: panels, their places, queries and legends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COLUMNS", "DASHBOARD", "Panel", "Query", "expand", "label", "read_dashboard"]

DASHBOARD = Path(__file__).parents[2] / "monitoring/dashboards/lmcache-xpu.json"
COLUMNS = 24  # of Grafana's grid
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")
_ANY = re.compile(r'\w+=~"\$\w+"(,\s*)?')  # a filter by one of the dashboard's variables


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel.

    Args:
        expression: PromQL with Grafana's variables in it.
        legend: names a series, from its labels.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel, or the heading of a row of panels.

    Args:
        kind: Grafana's name for it: row, stat or timeseries.
        title: its heading.
        place: left, top, width and height in Grafana's grid.
        unit: Grafana's name for it.
        most: where the axis ends; None leaves it to the values.
        stacked: whether series lie on each other.
        queries: what it shows.
    """

    kind: str
    title: str
    place: tuple[int, int, int, int]
    unit: str
    most: float | None
    stacked: bool
    queries: tuple[Query, ...]


def read_dashboard(path: Path = DASHBOARD) -> list[Panel]:
    """Return the panels of a dashboard's file, in its order."""
    panels = []
    for panel in json.loads(path.read_text())["panels"]:
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        stacking = defaults.get("custom", {}).get("stacking", {})
        grid = panel["gridPos"]
        panels.append(
            Panel(
                kind=panel["type"],
                title=panel["title"],
                place=(grid["x"], grid["y"], grid["w"], grid["h"]),
                unit=defaults.get("unit", "short"),
                most=defaults.get("max"),
                stacked=stacking.get("mode") == "normal",
                queries=tuple(
                    Query(target["expr"], target.get("legendFormat", ""))
                    for target in panel.get("targets", ())
                ),
            )
        )
    return panels


def expand(expression: str, *, scrape_s: float) -> str:
    """Return PromQL as Grafana sends it where all engines are chosen, a point for each scrape.

    Then the dashboard's variables match everything, so filters by them are left out. And
    $__rate_interval is four scrapes long.
    """
    filtered = _ANY.sub("", expression).replace("{}", "")
    return filtered.replace("$__rate_interval", f"{4 * scrape_s:g}s")


def label(legend: str, labels: Mapping[str, str]) -> str:
    """Return a series' name."""
    return _LABEL.sub(lambda name: labels.get(name[1], ""), legend).strip()
