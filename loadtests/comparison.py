"""Variants against each other, and the verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from loadtests.figures import Figures, Measured, figures
from loadtests.recorder import ENDS
from loadtests.slo import Check, Slo

__all__ = ["Arm", "Ratio", "Verdict", "compare", "judge"]

Times = npt.NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95
KEPT_UP = 0.8  # of the offered rate; short runs may miss a tenth by their ends alone
FEWEST = 5  # values on each side of a ratio


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant and what was measured of it.

    Args:
        name: a word.
        about: a line for people.
        runs: of the workload, one per repeat.
        control: of the workload without reuse, one per repeat.
    """

    name: str
    about: str
    runs: list[Measured] = field(default_factory=list)
    control: list[Measured] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio, and between what it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def figures(self) -> dict[str, float]:
        """For summary.json."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether all thresholds hold, and what there is to say."""

    sentences: list[str]
    checks: list[Check]

    @property
    def holds(self) -> bool:
        """Whether all thresholds do."""
        return all(check.holds for check in self.checks)

    @property
    def text(self) -> str:
        """All of it, in lines."""
        return "\n".join(self.sentences)


def compare(arms: Sequence[Arm], slo: Slo) -> dict[str, Figures]:
    """The figures of each arm, and its ratios to the first one."""
    found: dict[str, Figures] = {}
    for arm in arms:
        found[arm.name] = figures(arm.runs, slo.goodput) if arm.runs else {}
        if arm.control:
            found[arm.name]["no_reuse"] = figures(arm.control, slo.goodput)
        if arm is not arms[0]:
            found[arm.name] |= _ratios(arms[0], arm)
            before, now = (found[name].get("found_rate") for name in (arms[0].name, arm.name))
            if before is not None and now is not None:
                found[arm.name]["found_rate_gain"] = now - before
    return found


def _ratios(base: Arm, arm: Arm) -> Figures:
    """How many times lower times are than without offload, and what is paid for it."""
    found: Figures = {}
    if base.runs and arm.runs:
        later = _ttft(base.runs, later=True), _ttft(arm.runs, later=True)
        first = _ttft(base.runs, later=False), _ttft(arm.runs, later=False)
        _add(found, "ttft_p50_ratio", _ratio(*later, percentile=50))
        _add(found, "ttft_p95_ratio", _ratio(*later, percentile=95))
        _add(found, "first_round_p50_ratio", _ratio(*first, percentile=50))
    if base.control and arm.control:
        whole = _times_of(arm.control, "e2e_s"), _times_of(base.control, "e2e_s")
        if overhead := _ratio(*whole, percentile=50):
            shifted = Ratio(overhead.value - 1, overhead.low - 1, overhead.high - 1)
            _add(found, "no_reuse_overhead", shifted)
    return found


def _add(found: Figures, name: str, ratio: Ratio | None) -> None:
    if ratio is not None:
        found[name] = ratio.value
        found[f"{name}_ci"] = [ratio.low, ratio.high]


def _times_of(runs: Sequence[Measured], column: str) -> Times:
    return np.concatenate([run.answered[column].to_numpy(dtype=float) for run in runs])


def _ttft(runs: Sequence[Measured], *, later: bool) -> Times:
    rounds, times = _times_of(runs, "round"), _times_of(runs, "ttft_s")
    return times[rounds > 1] if later else times[rounds == 1]


def _ratio(above: Times, below: Times, *, percentile: int) -> Ratio | None:
    """Of a percentile of two samples; the interval is a bootstrap's, over requests."""
    if min(len(above), len(below)) < FEWEST:
        return None

    def statistic(a: Times, b: Times, axis: int = -1) -> Any:
        return np.percentile(a, percentile, axis=axis) / np.percentile(b, percentile, axis=axis)

    interval = stats.bootstrap(
        (above, below),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(float(statistic(above, below)), float(interval.low), float(interval.high))


def judge(arms: Sequence[Arm], found: dict[str, Figures], slo: Slo) -> Verdict:
    """The verdict: first what was gained, then what does not hold."""
    alone = len(arms) == 1
    checks = slo.check(slo.run if alone else slo.compare, found)
    tell: Callable[[Arm], list[str]] = (
        (lambda arm: [_one(found[arm.name])]) if alone else (lambda arm: _gain(arm, found, arms[0]))
    )
    sentences = [sentence for arm in (arms if alone else arms[1:]) for sentence in tell(arm)]
    if not alone and (behind := _behind(found[arms[0].name])):
        sentences.append(
            f"{arms[0].about} did not keep up: {behind}. Ratios have its queue in them."
        )
    broken = [f"{arm.name}: {why}" for arm in arms if (why := _cut_short(found[arm.name]))]
    missed = [check for check in checks if not check.holds]
    if any(check.threshold.figure == "client_lag_p95_s" for check in missed):
        sentences.append(
            "The client was the bottleneck: it came late to its own timers, so times are its own "
            "as well. Use more processes (--processes), or another machine for it."
        )
    if not checks:
        sentences.append("No threshold applies.")
    elif missed:
        sentences.append("Thresholds that do not hold: " + "; ".join(map(str, missed)) + ".")
    else:
        sentences.append(f"All {len(checks)} thresholds hold.")
    sentences += broken
    return Verdict(sentences, checks)


def _one(found: Figures) -> str:
    ttft, hits = found["ttft_s"], found.get("hit_rates")
    said = (
        f"{found['requests']} requests, {sum(found['failures'].values())} failed. Time to first "
        f"token {_ms(ttft['p50'])} at the median, {_ms(ttft['p95'])} at 95 %; "
        f"{found['answer_tokens_per_s']:.1f} answer tokens/s; "
        f"{found['achieved_qps']:.2f} requests/s sent"
    )
    if found["offered_qps"]:
        said += f" of {found['offered_qps']:.2f} offered, {found['late_sends']} late"
    if hits:
        said += (
            f". Hit rates: device {_percent(found['device_hit_rate'])} of all prompt tokens, "
            f"external {_percent(found['external_hit_rate'])} of the rest"
        )
    return said + "."


def _gain(arm: Arm, found: dict[str, Figures], base: Arm) -> list[str]:
    figure, plain = found[arm.name], found[base.name]
    said = []
    if "ttft_p50_ratio" in figure:
        low, high = figure["ttft_p50_ratio_ci"]
        helps = "helps" if low > 1 else "costs time" if high < 1 else "shows no clear gain"
        said.append(
            f"{arm.about[0].upper()}{arm.about[1:]} {helps}: time to first token of rounds 2 and "
            f"later is {_times(figure, 'ttft_p50_ratio')} lower than in {base.about} at the "
            f"median and {_times(figure, 'ttft_p95_ratio')} at 95 % "
            f"({_ms(plain['ttft_later_rounds_s']['p50'])} to "
            f"{_ms(figure['ttft_later_rounds_s']['p50'])}); answered "
            f"{figure['answered_qps']:.2f} requests/s against {plain['answered_qps']:.2f}; "
            f"hit rates: device {_percent(figure.get('device_hit_rate'))} (without: "
            f"{_percent(plain.get('device_hit_rate'))}), external "
            f"{_percent(figure.get('external_hit_rate'))} of the rest."
        )
    if "first_round_p50_ratio" in figure and arm.name == "disk":
        said.append(
            f"After the restart the first round is {_times(figure, 'first_round_p50_ratio')} "
            "faster than without offload."
        )
    if "no_reuse_overhead" in figure:
        overhead, (low, high) = figure["no_reuse_overhead"], figure["no_reuse_overhead_ci"]
        said.append(
            f"Where nothing can be found, whole requests take {abs(overhead):.1%} "
            f"{'more' if overhead > 0 else 'less'} time (95 % CI {low:+.1%} to {high:+.1%})."
        )
    return said


def _behind(found: Figures) -> str:
    offered, answered = found.get("offered_qps"), found.get("answered_qps")
    if not offered or answered is None or answered >= KEPT_UP * offered:
        return ""
    return f"it answered {answered:.2f} of {offered:.2f} requests/s"


def _cut_short(found: Figures) -> str:
    others = [why for why in found.get("ended_by", []) if why not in ENDS]
    return f"the run was cut short ({', '.join(others)})." if others else ""


def _times(figure: Figures, name: str) -> str:
    low, high = figure[f"{name}_ci"]
    return f"{figure[name]:.1f} times (95 % CI {low:.1f} to {high:.1f})"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def _percent(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.0%}"
