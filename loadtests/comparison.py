"""The comparison of variants, and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from loadtests import answer
from loadtests.answer import Answer, Kind
from loadtests.client import OK
from loadtests.figures import FEWEST, Figures, Measured, figures
from loadtests.recorder import ENDS
from loadtests.slo import Check, Slo
from loadtests.words import ms, percent

__all__ = ["Arm", "Ratio", "Verdict", "compare", "judge"]

Times = npt.NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95
KEPT_UP = 0.8  # of the offered rate; short runs may miss a tenth by their ends alone


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
    """The answers of a measurement, the sentences that explain them, and its thresholds.

    Args:
        answers: one for each variant but the first, or one for a single server.
        sentences: what else a reader has to know.
        checks: thresholds.
    """

    answers: list[Answer]
    sentences: list[str]
    checks: list[Check]

    @property
    def holds(self) -> bool:
        """Whether all answers are YES, and all thresholds hold."""
        return all(answer.kind is Kind.YES for answer in self.answers) and all(
            check.holds for check in self.checks
        )

    @property
    def lines(self) -> list[str]:
        """The answers first, then the sentences."""
        return [*map(str, self.answers), *self.sentences]

    @property
    def text(self) -> str:
        """All of it, a line each."""
        return "\n".join(self.lines)

    def show(self, report: Path) -> None:
        """Print it for a terminal: the answers last, where nothing scrolls them away."""
        console = Console(soft_wrap=True, markup=False, highlight=False)
        console.print(*self.sentences, f"Report: {report}", sep="\n")
        for each in self.answers:
            console.print(f"\n{each}", style=each.kind.style)


def compare(arms: Sequence[Arm], slo: Slo) -> dict[str, Figures]:
    """Return the figures of each arm, and its ratios to the first one."""
    by_arm: dict[str, Figures] = {}
    for arm in arms:
        by_arm[arm.name] = figures(arm.runs, slo.goodput) if arm.runs else {}
        if arm.control:
            control = by_arm[arm.name]["no_reuse"] = figures(arm.control, slo.goodput)
            by_arm[arm.name]["doubt"] = by_arm[arm.name].get("doubt") or control["doubt"]
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


def _times_of(runs: Sequence[Measured], column: str) -> list[Times]:
    return [run.answered[column].to_numpy(dtype=float) for run in runs]


def _ttft(runs: Sequence[Measured], *, later: bool) -> list[Times]:
    """Return times by run: rounds 2 and later after the ramp-up, or round 1 of the whole run.

    These are the requests of the figures `ttft_later_rounds_s` and `ttft_first_round_s`.
    """
    times = []
    for run in runs:
        rows = run.steady if later else run.rows
        rows = rows[rows["outcome"] == OK]
        rows = rows[rows["round"] > 1] if later else rows[rows["round"] == 1]
        times.append(rows["ttft_s"].to_numpy(dtype=float))
    return times


def _ratio(above: list[Times], below: list[Times], *, percentile: int) -> Ratio | None:
    """Return the ratio of a percentile of two variants, with a bootstrap's interval.

    Requests of one run share its machine, its minute and its queue, so runs are drawn first and
    then requests out of each: the two-stage bootstrap of Davison and Hinkley, Bootstrap Methods
    and their Application (1997), section 3.8. Of one run it knows only how requests differ.
    """
    above, below = ([run for run in runs if len(run)] for runs in (above, below))
    if min(sum(map(len, runs)) for runs in (above, below)) < FEWEST:
        return None
    rng = np.random.default_rng(0)

    def drawn(runs: list[Times]) -> float:
        picked = [runs[i] for i in rng.integers(len(runs), size=len(runs))]
        again = [rng.choice(run, size=len(run)) for run in picked]
        return float(np.percentile(np.concatenate(again), percentile))

    ratios = [drawn(above) / drawn(below) for _ in range(RESAMPLES)]
    value = np.percentile(np.concatenate(above), percentile) / np.percentile(
        np.concatenate(below), percentile
    )
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Ratio(float(value), float(low), float(high))


def judge(arms: Sequence[Arm], by_arm: dict[str, Figures], slo: Slo) -> Verdict:
    """Return the verdict: the answers, what explains them, and the thresholds that do not hold."""
    base, *others = arms
    plain = by_arm[base.name]
    checks = slo.check(slo.compare if others else slo.run, by_arm)
    if others:
        answers = [
            answer.of_variant(arm.about, by_arm[arm.name], base.about, plain) for arm in others
        ]
        sentences = [line for arm in others for line in _gains(arm, by_arm[arm.name], base)]
        sentences += [
            f"{arm.about} did not keep up: {behind}. Its times have its queue in them. Send less "
            "(--option=--qps=...), or measure while nothing else runs on the machine."
            for arm in arms
            if (behind := _behind(by_arm[arm.name]))
        ]
    else:
        answers, sentences = [answer.of_run(plain)], _summary(plain)
    missed = [check for check in checks if not check.holds]
    if any(check.threshold.figure == "client_lag_p95_s" for check in missed):
        sentences.append(
            "The client was the bottleneck: it came late to its own timers, so times are its own "
            "as well. Use more processes (--processes), or another machine for it."
        )
    if not checks:
        sentences.append("No threshold applies.")
    elif missed:
        sentences += [f"Threshold missed: {check}." for check in missed]
    ends = [f"{arm.name}: {end}" for arm in arms if (end := _cut_short(by_arm[arm.name]))]
    if checks and not missed and not ends:
        sentences.append(f"All {len(checks)} thresholds hold.")
    sentences += ends
    return Verdict(answers, sentences, checks)


def _summary(figure: Figures) -> list[str]:
    """Return what one server did; each sentence is of one population, which it names."""
    failed = sum(figure["failures"].values())
    lines = [f"{figure['requests']} requests in the whole run, {failed or 'none'} failed."]
    for part, key in (
        ("After the ramp-up", "ttft_s"),
        ("Round 1, whole run", "ttft_first_round_s"),
        ("Rounds 2 and later, after the ramp-up", "ttft_later_rounds_s"),
    ):
        if figure[key]["n"]:
            lines.append(f"{part}: time to first token {_times(figure[key])}.")
    hit, missed = figure["ttft_hit_s"], figure["ttft_missed_s"]
    if hit["n"] or missed["n"]:
        lines += [
            f"Whole run, {words}: time to first token {_times(times)}."
            for words, times in (
                ("at least half of the prompt from a cache (the engine's own or a tier)", hit),
                ("less than half of it", missed),
            )
            if times["n"]
        ]
    else:
        lines.append(
            "The server does not say what its caches had of each request, so times of hits and of "
            "misses are not told apart. vLLM says it with --enable-prompt-tokens-details."
        )
    if figure["offered_qps"]:
        lines.append(
            f"After the ramp-up {figure['achieved_qps']:.2f} requests/s were sent, of "
            f"{figure['offered_qps']:.2f} offered; {figure['late_sends']} of the whole run went "
            "out late, because an answer was not there yet."
        )
    return lines


def _times(times: Figures) -> str:
    if times["p50"] is None:
        return f"mean {ms(times['mean'])} (n = {times['n']}: too few for percentiles)"
    return (
        f"mean {ms(times['mean'])}, median {ms(times['p50'])}, p95 {ms(times['p95'])} "
        f"(n = {times['n']})"
    )


def _gains(arm: Arm, figure: Figures, base: Arm) -> list[str]:
    """Return what the answer leaves out, one thought a sentence."""
    about = f"{arm.about[0].upper()}{arm.about[1:]}"
    lines = []
    if "ttft_p95_ratio" in figure:
        lines.append(f"{about}: p95 of rounds 2 and later, {_sooner(figure, 'ttft_p95_ratio')}.")
    if "first_round_p50_ratio" in figure and arm.name == "disk":
        lines.append(
            f"{about}: median of round 1, {_sooner(figure, 'first_round_p50_ratio')}. Without "
            "offload nothing is left after a restart."
        )
    if "no_reuse_overhead" in figure:
        overhead, (low, high) = figure["no_reuse_overhead"], figure["no_reuse_overhead_ci"]
        clear = low > 0 or high < 0
        lines.append(
            f"{about}, where nothing can be found: whole requests take "
            f"{abs(overhead):.1%} {'more' if overhead > 0 else 'less'} time than in {base.about} "
            f"({low:+.1%} to {high:+.1%}" + (")." if clear else "), which is no clear difference.")
        )
    if figure.get("device_hit_rate") is not None:
        lines.append(
            f"{about}, after the ramp-up: {percent(figure['device_hit_rate'])} of prompt tokens "
            f"from the engine's own cache, {percent(figure['external_hit_rate'])} of the rest from "
            "the tiers."
        )
    return lines


def _sooner(figure: Figures, name: str) -> str:
    low, high = figure[f"{name}_ci"]
    return f"{figure[name]:.1f} times sooner ({low:.1f} to {high:.1f})"


def _behind(figure: Figures) -> str:
    offered, answered = figure.get("offered_qps"), figure.get("answered_qps")
    if not offered or answered is None or answered >= KEPT_UP * offered:
        return ""
    return f"it answered {answered:.2f} of {offered:.2f} requests/s"


def _cut_short(figure: Figures) -> str:
    causes = [cause for cause in figure.get("ended_by", []) if cause not in ENDS]
    return f"the run was cut short ({', '.join(causes)})." if causes else ""
