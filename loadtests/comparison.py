"""The comparison of variants, and the verdict in words."""

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
    """A variant and its runs.

    Args:
        name: a word.
        about: a line for readers.
        runs: runs of the workload, one per repeat.
        control: runs of the workload without reuse, one per repeat.
    """

    name: str
    about: str
    runs: list[Measured] = field(default_factory=list)
    control: list[Measured] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio, and the bounds between which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def figures(self) -> dict[str, float]:
        """The ratio and its bounds as summary.json has them."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sentences of a comparison, and its thresholds."""

    sentences: list[str]
    checks: list[Check]

    @property
    def holds(self) -> bool:
        """Whether all thresholds hold."""
        return all(check.holds for check in self.checks)

    @property
    def text(self) -> str:
        """All sentences, a line each."""
        return "\n".join(self.sentences)


def compare(arms: Sequence[Arm], slo: Slo) -> dict[str, Figures]:
    """Return the figures of each arm, and its ratios to the first one."""
    by_arm: dict[str, Figures] = {}
    for arm in arms:
        by_arm[arm.name] = figures(arm.runs, slo.goodput) if arm.runs else {}
        if arm.control:
            by_arm[arm.name]["no_reuse"] = figures(arm.control, slo.goodput)
        if arm is not arms[0]:
            by_arm[arm.name] |= _ratios(arms[0], arm)
            base, rate = (by_arm[name].get("found_rate") for name in (arms[0].name, arm.name))
            if base is not None and rate is not None:
                by_arm[arm.name]["found_rate_gain"] = rate - base
    return by_arm


def _ratios(base: Arm, arm: Arm) -> Figures:
    """Return how many times lower times are than without offload, and the price of it."""
    ratios: Figures = {}
    if base.runs and arm.runs:
        later = _ttft(base.runs, later=True), _ttft(arm.runs, later=True)
        first = _ttft(base.runs, later=False), _ttft(arm.runs, later=False)
        _add(ratios, "ttft_p50_ratio", _ratio(*later, percentile=50))
        _add(ratios, "ttft_p95_ratio", _ratio(*later, percentile=95))
        _add(ratios, "first_round_p50_ratio", _ratio(*first, percentile=50))
    if base.control and arm.control:
        requests = _times_of(arm.control, "e2e_s"), _times_of(base.control, "e2e_s")
        if overhead := _ratio(*requests, percentile=50):
            shifted = Ratio(overhead.value - 1, overhead.low - 1, overhead.high - 1)
            _add(ratios, "no_reuse_overhead", shifted)
    return ratios


def _add(ratios: Figures, name: str, ratio: Ratio | None) -> None:
    if ratio is not None:
        ratios[name] = ratio.value
        ratios[f"{name}_ci"] = [ratio.low, ratio.high]


def _times_of(runs: Sequence[Measured], column: str) -> Times:
    return np.concatenate([run.answered[column].to_numpy(dtype=float) for run in runs])


def _ttft(runs: Sequence[Measured], *, later: bool) -> Times:
    rounds, times = _times_of(runs, "round"), _times_of(runs, "ttft_s")
    return times[rounds > 1] if later else times[rounds == 1]


def _ratio(above: Times, below: Times, *, percentile: int) -> Ratio | None:
    """Return the ratio of a percentile of two samples, with a bootstrap's interval."""
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


def judge(arms: Sequence[Arm], by_arm: dict[str, Figures], slo: Slo) -> Verdict:
    """Return the verdict: first the gains, then the thresholds that do not hold."""
    single = len(arms) == 1
    checks = slo.check(slo.run if single else slo.compare, by_arm)
    tell: Callable[[Arm], list[str]] = (
        (lambda arm: [_summary(by_arm[arm.name])])
        if single
        else (lambda arm: _gain(arm, by_arm, arms[0]))
    )
    sentences = [sentence for arm in (arms if single else arms[1:]) for sentence in tell(arm)]
    if not single and (behind := _behind(by_arm[arms[0].name])):
        sentences.append(
            f"{arms[0].about} did not keep up: {behind}. Ratios have its queue in them."
        )
    broken = [f"{arm.name}: {end}" for arm in arms if (end := _cut_short(by_arm[arm.name]))]
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


def _summary(figure: Figures) -> str:
    ttft, hits = figure["ttft_s"], figure.get("hit_rates")
    sentence = (
        f"{figure['requests']} requests, {sum(figure['failures'].values())} failed. Time to first "
        f"token {_ms(ttft['p50'])} at the median, {_ms(ttft['p95'])} at 95 %; "
        f"{figure['answer_tokens_per_s']:.1f} answer tokens/s; "
        f"{figure['achieved_qps']:.2f} requests/s sent"
    )
    if figure["offered_qps"]:
        sentence += f" of {figure['offered_qps']:.2f} offered, {figure['late_sends']} late"
    if hits:
        sentence += (
            f". Hit rates: device {_percent(figure['device_hit_rate'])} of all prompt tokens, "
            f"external {_percent(figure['external_hit_rate'])} of the rest"
        )
    return sentence + "."


def _gain(arm: Arm, by_arm: dict[str, Figures], base: Arm) -> list[str]:
    figure, plain = by_arm[arm.name], by_arm[base.name]
    sentences = []
    if "ttft_p50_ratio" in figure:
        low, high = figure["ttft_p50_ratio_ci"]
        helps = "helps" if low > 1 else "costs time" if high < 1 else "shows no clear gain"
        sentences.append(
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
        sentences.append(
            f"After the restart the first round is {_times(figure, 'first_round_p50_ratio')} "
            "faster than without offload."
        )
    if "no_reuse_overhead" in figure:
        overhead, (low, high) = figure["no_reuse_overhead"], figure["no_reuse_overhead_ci"]
        sentences.append(
            f"Where nothing can be found, whole requests take {abs(overhead):.1%} "
            f"{'more' if overhead > 0 else 'less'} time (95 % CI {low:+.1%} to {high:+.1%})."
        )
    return sentences


def _behind(figure: Figures) -> str:
    offered, answered = figure.get("offered_qps"), figure.get("answered_qps")
    if not offered or answered is None or answered >= KEPT_UP * offered:
        return ""
    return f"it answered {answered:.2f} of {offered:.2f} requests/s"


def _cut_short(figure: Figures) -> str:
    causes = [cause for cause in figure.get("ended_by", []) if cause not in ENDS]
    return f"the run was cut short ({', '.join(causes)})." if causes else ""


def _times(figure: Figures, name: str) -> str:
    low, high = figure[f"{name}_ci"]
    return f"{figure[name]:.1f} times (95 % CI {low:.1f} to {high:.1f})"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def _percent(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.0%}"
