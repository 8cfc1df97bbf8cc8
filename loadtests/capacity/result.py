"""What a sweep came to: capacity.json, a table, a picture, and one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from loadtests.capacity.step import Limits, Step
from loadtests.plots import COLOURS, DPI, SIZE

__all__ = ["PICTURE", "RESULT", "TABLE", "most_users", "verdict", "write"]

RESULT, TABLE, PICTURE = "capacity.json", "capacity.md", "capacity.png"

Sweep = Mapping[str, Sequence[Step]]


def most_users(steps: Sequence[Step]) -> tuple[int, int | None]:
    """Return the most users that fit, and the fewest that don't; None if all did.

    A number that fits above one that doesn't is not counted: more users can't have less to do.
    """
    beyond = min((step.users for step in steps if not step.fits), default=None)
    fitting = [
        step.users for step in steps if step.fits and (beyond is None or step.users < beyond)
    ]
    return max(fitting, default=0), beyond


def verdict(sweep: Sweep) -> str:
    """Say it in one line: 'none: 6 users, cpu: 14 users: 2.3 times'.

    The ratio is to the first variant.
    """
    parts, base = [], None
    for name, steps in sweep.items():
        if not steps:
            continue
        most, beyond = most_users(steps)
        part = f"{name}: {'at least ' if beyond is None else ''}{most} users"
        if base:
            part += f": {'at least ' if beyond is None else ''}{most / base:.1f} times"
        elif base is None and beyond is not None:
            base = most
        parts.append(part)
    return ", ".join(parts)


def write(sweep: Sweep, limits: Limits, facts: Mapping[str, Any], directory: Path) -> None:
    """Write the three files, each of them whole or not at all."""
    variants = {}
    for name, steps in sweep.items():
        most, beyond = most_users(steps)
        variants[name] = {
            "most_users": most,
            "fewest_that_do_not_fit": beyond,
            "steps": [step.facts() for step in steps],
        }
    result = {
        "verdict": verdict(sweep),
        "limits": {name: getattr(limits, name) for name in limits.__slots__},
        "variants": variants,
        "facts": facts,
    }
    _replace(directory / RESULT, json.dumps(result, indent=2) + "\n")
    _replace(directory / TABLE, _table(sweep, limits))
    _draw(sweep, limits, directory / PICTURE)


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _table(sweep: Sweep, limits: Limits) -> str:
    lines = [
        f"**{verdict(sweep)}**",
        "",
        f"![Users against time to first token]({PICTURE})",
        "",
        f"A user fits while TTFT is at most {limits.ttft_s:g} s at 95 %, the mean ITL at most "
        f"{limits.itl_s * 1e3:g} ms, and at most {limits.failure_rate:.0%} fail.",
        "",
        "| variant | users | requests/s offered | n | TTFT p50, ms | TTFT p95, ms | ITL mean, ms | "
        "device hits | external hits, of the rest | fits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in sweep.items():
        for step in sorted(steps, key=lambda step: step.users):
            cells = [
                name,
                str(step.users),
                f"{step.offered_qps:.2f}",
                str(step.requests),
                _ms(step.ttft_p50_s),
                _ms(step.ttft_p95_s),
                _ms(step.itl_mean_s),
                _share(step.device_hit_rate),
                _share(step.external_hit_rate),
                "yes" if step.fits else f"no: {'; '.join(step.misses)}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _draw(sweep: Sweep, limits: Limits, path: Path) -> None:
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_title("Users within the thresholds", loc="left", fontweight="bold")
        for (name, steps), colour in zip(sweep.items(), COLOURS, strict=False):
            drawn = sorted(
                (s for s in steps if _height(s, limits) is not None), key=lambda s: s.users
            )
            most, _ = most_users(steps)
            x = [step.users for step in drawn]
            y = [_height(step, limits) or 0.0 for step in drawn]
            axes.plot(x, y, color=colour, linewidth=1.5, label=f"{name}: {most} users fit")
            for step, height in zip(drawn, y, strict=True):
                face = colour if step.fits else "white"
                mark = "^" if step.stopped_early else "o"
                axes.plot(step.users, height, mark, color=colour, markerfacecolor=face)
            if most:
                axes.axvline(most, color=colour, linestyle=":", linewidth=1)
        axes.axhline(limits.ttft_s, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"threshold: {limits.ttft_s:g} s",
            (1, limits.ttft_s),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
        )
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("users (filled: fits; hollow: does not; triangle: at least, stopped early)")
        axes.set_ylabel("time to first token at 95 %, s")
        axes.grid(alpha=0.25)
        if axes.lines:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=DPI)


def _height(step: Step, limits: Limits) -> float | None:
    """Where a step is drawn: one that ended too early for a percentile is over the limit."""
    early = limits.ttft_s if step.stopped_early else step.ttft_mean_s
    return step.ttft_p95_s if step.ttft_p95_s is not None else early
