"""One picture of a whole report, for places that show images but no pages."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtests.answer import Kind
from loadtests.figures import Figures
from loadtests.plots import COLOURS, DPI, plain_ticks
from loadtests.variants import VARIANTS

__all__ = ["NAME", "draw_summary"]

NAME = "summary.png"
WIDTH = 10.0  # inches
LINE = 0.2  # of text
PANELS = 4.0
CHARACTERS = 118  # of a line of text
SHARES = (
    ("engine's own cache", "#56B4E9"),
    ("tiers", "#009E73"),
    ("computed", "#DDDDDD"),
)


def draw_summary(summary: Mapping[str, Any], directory: Path) -> Path:
    """Write summary.png: answers, missed thresholds, times by round, and who had the prompts.

    Args:
        summary: a report's summary.json, so that the picture can be drawn without the rows.
        directory: where to write.
    """
    texts = [(f"{each['answer']}: {each['why']}", each["answer"]) for each in summary["answers"]]
    texts += [
        (f"Threshold missed: {check['what']}.", Kind.NO.value)
        for check in summary["checks"]
        if not check["holds"]
    ]
    lines = [
        (line, Kind(kind).colour)
        for text, kind in texts
        for line in textwrap.wrap(text, CHARACTERS)
    ]
    head = LINE * (len(lines) + 1)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(WIDTH, head + PANELS))
        grid = figure.add_gridspec(2, 1, height_ratios=(head, PANELS))
        top = figure.add_subfigure(grid[0])
        bottom = figure.add_subfigure(grid[1])
        for number, (line, colour) in enumerate(lines, 1):
            top.text(0.01, 1 - number * LINE / head, line, color=colour, fontsize=10)
        times, shares = bottom.subplots(1, 2, width_ratios=(3, 2))
        bottom.subplots_adjust(left=0.07, right=0.97, top=0.92, bottom=0.24, wspace=0.36)
        _plot_means(times, summary["variants"])
        bottom.legend(
            *times.get_legend_handles_labels(), loc="lower left", ncols=2, frameon=False, fontsize=8
        )
        _plot_shares(shares, summary["variants"])
        path = directory / NAME
        figure.savefig(path, dpi=DPI)
    return path


def _plot_means(axes: Axes, by_arm: Mapping[str, Figures]) -> None:
    axes.set_title("Time to first token, ms: mean by round", loc="left")
    axes.set_xlabel("round, ramp-up included")
    axes.grid(alpha=0.25)
    rounds: set[int] = set()
    for i, (name, figures) in enumerate(by_arm.items()):
        by_round = figures.get("ttft_by_round_s", {})
        means = {int(number): times["mean"] for number, times in by_round.items()}
        if not means:
            continue
        about = VARIANTS[name].about if name in VARIANTS else name
        axes.plot(
            list(means),
            [mean_s * 1e3 for mean_s in means.values()],
            marker="o",
            color=COLOURS[i % len(COLOURS)],
            label=f"{about} (n = {figures['requests']})",
        )
        rounds |= means.keys()
    if rounds:
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.set_xticks(sorted(rounds))


def _plot_shares(axes: Axes, by_arm: Mapping[str, Figures]) -> None:
    """Draw of all prompt tokens of the whole run, who had them."""
    axes.set_title("Prompt tokens of the whole run", loc="left")
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of prompt tokens")
    hits = {
        name: figures["hit_rates"]["whole run"]
        for name, figures in by_arm.items()
        if figures.get("hit_rates")
    }
    labels = []
    for place, (name, counts) in enumerate(hits.items()):
        total = counts["device_queries"]
        labels.append(f"{name}\n{total:,.0f} tokens")
        if not total:
            continue
        parts = [counts["device_hits"], counts["external_hits"]]
        left = 0.0
        for part, (_, colour) in zip([*parts, total - sum(parts)], SHARES, strict=True):
            width = part / total * 100
            axes.barh(place, width, left=left, height=0.6, color=colour)
            if width >= 8:
                axes.text(left + width / 2, place, f"{width:.0f} %", ha="center", va="center")
            left += width
    if not hits:
        axes.text(50, 0.5, "the server's counters were not read", ha="center")
        axes.set_yticks([])
        return
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    patches = [axes.barh(0, 0, color=colour, label=label) for label, colour in SHARES]
    axes.legend(
        handles=patches,
        loc="upper center",
        bbox_to_anchor=(0.4, -0.15),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
