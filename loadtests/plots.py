"""The pictures of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from loadtests.client import OK
from loadtests.comparison import Arm
from loadtests.figures import Figures, Measured
from loadtests.hits import hits_over_time

__all__ = ["COLOURS", "DPI", "draw", "plain_ticks"]

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SIZE = (8.0, 4.5)
DPI = 110
WINDOW_S = 10.0


def draw(
    arms: Sequence[Arm], by_arm: dict[str, Figures], directory: Path
) -> list[tuple[str, Path]]:
    """Write PNG files; their captions and paths."""
    pictures: dict[str, tuple[str, Callable[[], Figure | None]]] = {
        "ttft-cdf.png": (
            "Time to first token, share of requests that had it by then. Rounds 2 and later.",
            lambda: _cdf(arms),
        ),
        "ttft-by-round.png": (
            "Time to first token by round: each request is a dot, the line their mean. Round 1 is "
            "sent without history.",
            lambda: _by_round(arms),
        ),
        "hit-rate.png": (
            f"Where prompt tokens came from, in windows of at most {WINDOW_S:g} s, first run of "
            "each variant. Both shares are of all prompt tokens, so they add up; the rest was "
            "computed.",
            lambda: _hit_rate(arms),
        ),
        "throughput.png": (
            "Requests answered and tokens of their answers, per second.",
            lambda: _throughput(arms, by_arm),
        ),
    }
    written = []
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        for name, (caption, make) in pictures.items():
            if (figure := make()) is not None:
                figure.savefig(directory / name, dpi=DPI)
                written.append((caption, directory / name))
    return written


def _colours(arms: Sequence[Arm]) -> dict[str, str]:
    return {arm.name: COLOURS[i % len(COLOURS)] for i, arm in enumerate(arms)}


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    return figure, axes


def _answered(arm: Arm) -> pd.DataFrame:
    rows = pd.concat([run.rows for run in arm.runs]) if arm.runs else pd.DataFrame()
    return rows[rows["outcome"] == OK] if len(rows) else rows


def _cdf(arms: Sequence[Arm]) -> Figure | None:
    figure, axes = _axes("Time to first token", "time to first token, ms", "share of requests, %")
    drawn = False
    for arm in arms:
        rows = _answered(arm)
        if not len(rows):
            continue
        later = rows[rows["round"] > 1] if (rows["round"] > 1).any() else rows
        times_ms = np.sort(later["ttft_s"].to_numpy(dtype=float)) * 1e3
        shares = np.arange(len(times_ms) + 1) / len(times_ms) * 100
        axes.step(
            [times_ms[0], *times_ms],
            shares,
            where="post",
            color=_colours(arms)[arm.name],
            linewidth=2,
            label=f"{arm.about} (n = {len(times_ms)})",
        )
        drawn = True
    if not drawn:
        return None
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    axes.set_ylim(0, 101)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _by_round(arms: Sequence[Arm]) -> Figure | None:
    figure, axes = _axes("Time to first token by round", "round", "time to first token, ms")
    if not _plot_rounds(axes, arms):
        return None
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _plot_rounds(axes: Axes, arms: Sequence[Arm]) -> bool:
    """Draw requests and their mean by round; whether there are any."""
    rounds: set[int] = set()
    for i, arm in enumerate(arms):
        rows = _answered(arm)
        if not len(rows):
            continue
        mean_ms = rows.groupby("round")["ttft_s"].mean() * 1e3
        # Side by side, or the dots would hide each other.
        aside = (i - (len(arms) - 1) / 2) * 0.12
        colour = _colours(arms)[arm.name]
        axes.scatter(rows["round"] + aside, rows["ttft_s"] * 1e3, s=12, alpha=0.35, color=colour)
        label = f"{arm.about} (n = {len(rows)})"
        axes.plot(mean_ms.index + aside, mean_ms, linewidth=2, color=colour, label=label)
        rounds |= set(mean_ms.index)
    if not rounds:
        return False
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    axes.set_xticks(sorted(rounds))
    return True


def plain_ticks(axis: Axis) -> None:
    """Numbers that people read, on a logarithmic axis of whatever span."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def _hit_rate(arms: Sequence[Arm]) -> Figure | None:
    tables = {
        arm.name: table
        for arm in arms
        if arm.runs and len(table := hits_over_time(arm.runs[0].metrics, _window_s(arm.runs[0])))
    }
    if not tables:
        return None
    figure = Figure(figsize=(SIZE[0], 1.0 + 1.6 * len(tables)), layout="constrained")
    figure.suptitle("Where prompt tokens came from", x=0.01, ha="left", fontweight="bold")
    panels = figure.subplots(len(tables), 1, sharex=True, squeeze=False)[:, 0]
    about = {arm.name: arm.about for arm in arms}
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        axes.stackplot(
            table["at_s"],
            table["device"] * 100,
            table["external"] * 100,
            labels=("engine's own cache", "LMCache"),
            colors=("#56B4E9", "#009E73"),
            alpha=0.85,
        )
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
        axes.set_ylabel("% of tokens")
        axes.set_title(about[name], loc="left", fontsize=10)
        axes.grid(alpha=0.25)
    panels[0].legend(loc="upper right", frameon=True, fontsize=8)
    panels[-1].set_xlabel("seconds after the start")
    return figure


def _window_s(run: Measured) -> float:
    return min(WINDOW_S, float(run.meta["lasted_s"]) / 5)


def _throughput(arms: Sequence[Arm], by_arm: dict[str, Figures]) -> Figure | None:
    measured = [arm for arm in arms if arm.runs]
    if not measured:
        return None
    figure = Figure(figsize=(SIZE[0], 1.4 + 0.5 * len(measured)), layout="constrained")
    figure.suptitle("Throughput", x=0.01, ha="left", fontweight="bold")
    rate_axes, token_axes = figure.subplots(1, 2, sharey=True)
    names = [arm.about for arm in measured]
    for axes, key, title in (
        (rate_axes, "answered_qps", "requests/s"),
        (token_axes, "answer_tokens_per_s", "answer tokens/s"),
    ):
        values = [by_arm[arm.name][key] for arm in measured]
        bars = axes.barh(names, values, color=[_colours(arms)[arm.name] for arm in measured])
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_xlabel(title)
        axes.set_xlim(0, max(values) * 1.15 or 1)
    rate_axes.invert_yaxis()
    offered = by_arm[measured[0].name]["offered_qps"]
    if offered:
        rate_axes.axvline(offered, color="black", linestyle=":", linewidth=1.5)
        rate_axes.set_xlim(0, max(rate_axes.get_xlim()[1], offered * 1.15))
        rate_axes.set_xlabel("requests/s (dotted: offered)")
    return figure
