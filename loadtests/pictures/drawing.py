"""Draws the dashboard from a recording: its panels, where Grafana has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadtests.pictures.dashboard import COLUMNS, Panel
from loadtests.pictures.recording import Recording, Series
from loadtests.pictures.units import text, tick_locator

__all__ = ["DPI", "draw_dashboard", "shown"]

# Grafana's classic palette, and its light theme.
COLOURS = ("#56A64B", "#F2CC0C", "#3274D9", "#FF780A", "#E02F44", "#8F3BB8", "#1F78C1", "#BA43A9")
PAGE, PAPER, INK, FAINT = "#F4F5F5", "#FFFFFF", "#24292E", "#D8DADC"
DPI = 100
WIDTH = 16.0  # inches
UNIT = 0.3  # of Grafana's grid, downwards
GAP = 0.06  # inches around a panel
TITLE = 0.28
LEFT, AXIS, LEGEND = 0.65, 0.22, 0.24
MANY = 4  # series; of more, those that are 0 all the time are counted and not drawn


def shown(panels: Sequence[Panel], recording: Recording) -> list[Panel]:
    """Return the panels without rows of which none has a value, as that of a GPU on a CPU."""
    rows: list[list[Panel]] = []
    for panel in panels:
        if panel.kind == "row" or not rows:
            rows.append([])
        rows[-1].append(panel)
    return [
        panel
        for row in rows
        if any(recording.series(query) for panel in row for query in panel.queries)
        for panel in row
    ]


def draw_dashboard(panels: Sequence[Panel], recording: Recording) -> Figure:
    """Return a picture of the panels that have values."""
    panels = shown(panels, recording)
    bottom = max(top + height for _, top, _, height in (panel.place for panel in panels))
    size = (WIDTH, bottom * UNIT + GAP)
    with mpl.rc_context({"font.size": 8, "text.color": INK}):
        figure = Figure(figsize=size, facecolor=PAGE)
        for panel in panels:
            _draw_panel(figure, panel, recording)
    return figure


def _draw_panel(figure: Figure, panel: Panel, recording: Recording) -> None:
    width, height = figure.get_size_inches()
    left, top, columns, rows = panel.place

    def axes_at(x: float, y: float, w: float, h: float) -> Axes:
        """Return axes by inches from the upper left corner."""
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    x, y = left * WIDTH / COLUMNS + GAP, top * UNIT + GAP
    w, h = columns * WIDTH / COLUMNS - 2 * GAP, rows * UNIT - GAP
    paper = axes_at(x, y, w, h)
    paper.set(xticks=[], yticks=[], facecolor=PAGE if panel.kind == "row" else PAPER)
    paper.spines[:].set_color(PAGE if panel.kind == "row" else FAINT)
    paper.text(
        0.08 / w, 1 - 0.15 / h, panel.title, va="center", fontweight="bold", fontsize=9,
        transform=paper.transAxes,
    )  # fmt: skip
    if panel.kind == "row":
        return
    series = [line for query in panel.queries for line in recording.series(query)]
    if not any(math.isfinite(value) for line in series for value in line.values):
        paper.text(0.5, 0.5, "No data", ha="center", va="center", transform=paper.transAxes)
    elif panel.kind == "stat":
        _draw_stat(axes_at(x, y + TITLE, w, h - TITLE), panel, series[0])
    else:
        room = h - TITLE - AXIS - LEGEND
        axes = axes_at(x + LEFT, y + TITLE, w - LEFT - 0.1, room)
        live, note = _without_zeros(series)
        _draw_lines(axes, panel, live, recording.minutes)
        if note:
            axes.plot([], [], linestyle="", label=note)
        axes.legend(
            loc="center left", bbox_to_anchor=(-0.08, -(AXIS + LEGEND / 2) / room),
            ncols=len(live) + 1, frameon=False, handlelength=1, columnspacing=1, borderpad=0,
        )  # fmt: skip


def _draw_stat(axes: Axes, panel: Panel, line: Series) -> None:
    """Draw the last value, over a small graph of all."""
    axes.axis("off")
    places = range(len(line.values))
    axes.fill_between(places, line.values, color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot(places, line.values, color=COLOURS[0], linewidth=1)
    finite = [value for value in line.values if math.isfinite(value)]
    axes.set(xlim=(0, len(line.values) - 1), ylim=(0, max(*finite, 1e-9) * 3))
    axes.text(
        0.5, 0.6, text(finite[-1], panel.unit, finite[-1]), ha="center", va="center", fontsize=22,
        color=COLOURS[0], transform=axes.transAxes,
    )  # fmt: skip


def _without_zeros(series: Sequence[Series]) -> tuple[Sequence[Series], str]:
    """Return the series to draw, and a note on those that are left out."""
    live = [line for line in series if any(value > 0 for value in line.values)]
    zeros = len(series) - len(live)
    if len(series) <= MANY or not zeros:
        return series, ""
    return live, f"{zeros} {'more ' if live else ''}at 0"


def _draw_lines(
    axes: Axes, panel: Panel, series: Sequence[Series], minutes: Sequence[float]
) -> None:
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    base = [0.0] * len(minutes)
    highest = 0.0
    for i, line in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        tops = line.values
        if panel.stacked:  # a series that has no value here adds nothing
            tops = [
                low + (value if math.isfinite(value) else 0)
                for low, value in zip(base, line.values, strict=True)
            ]
        axes.fill_between(minutes, base, tops, color=colour, alpha=0.1, linewidth=0)
        axes.plot(minutes, tops, color=colour, linewidth=1, label=line.name or " ")
        highest = max(highest, *(value for value in tops if math.isfinite(value)), 0.0)
        base = tops if panel.stacked else base
    axes.set_xlim(minutes[0], minutes[-1])
    axes.set_ylim(0, panel.most or highest * 1.1 or 1)
    highest = panel.most or highest
    axes.yaxis.set_major_locator(tick_locator(panel.unit, highest))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value, panel.unit, highest)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} min"))
