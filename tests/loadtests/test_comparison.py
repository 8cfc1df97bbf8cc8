"""Ratios and the verdict, from rows whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
from measured_runs import COUNTED, FITS, NEW, NOT_ASKED, SLO, arms, row, run, slo_file

from loadtests.comparison import Arm, compare, judge
from loadtests.slo import Slo


def test_a_gain_is_said_with_its_confidence(tmp_path):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)
    slo = Slo.load(slo_file(tmp_path))
    comparison = compare(made, slo)
    cpu, disk = comparison["cpu"], comparison["disk"]
    assert cpu["ttft_p50_ratio"] == pytest.approx(10, rel=0.1)
    low, high = cpu["ttft_p50_ratio_ci"]
    assert 9 < low < cpu["ttft_p50_ratio"] < high < 11
    assert disk["first_round_p50_ratio"] == pytest.approx(10, rel=0.15)
    assert cpu["no_reuse_overhead"] == pytest.approx(0.03, abs=0.02)
    assert cpu["no_reuse_overhead_ci"][0] < cpu["no_reuse_overhead"]
    verdict = judge(made, comparison, slo)
    assert verdict.holds
    assert verdict.lines[0].startswith("YES: CPU tier. First tokens come 10.")
    assert "n = 37 requests in 1 run of vLLM without offload and 37 in 1 run" in verdict.lines[0]
    assert "within this run only" in verdict.lines[0]
    assert "80% of the rest from the tiers" in verdict.text
    assert "All 3 thresholds hold." in verdict.sentences


@pytest.mark.parametrize(
    ("cpu_s", "says"),
    [
        (1.0, "NO: CPU tier. No clear gain (1.0"),
        (1.5, "NO: CPU tier. First tokens come 1.5 times later"),
    ],
)
def test_no_gain_is_said_as_well(tmp_path, cpu_s, says):
    made = arms(tmp_path, base_s=1.0, cpu_s=cpu_s, disk_first_s=0.9)
    slo = Slo.load(slo_file(tmp_path))
    verdict = judge(made, compare(made, slo), slo)
    assert not verdict.holds
    assert verdict.lines[0].startswith(says)
    assert "Threshold missed: cpu: gain in time to first token, median of rounds 2" in verdict.text
    assert "Threshold missed: disk: gain in time to first token, median of round 1" in verdict.text


def test_runs_that_differ_widen_the_interval(tmp_path):
    """Each run's own requests are alike; between two of them the machine became half as fast."""

    def arm(name, *runs_s):
        noise = np.random.default_rng(1)
        made = [
            [row(i, ttft_s=run_s * noise.normal(1, 0.02)) for i in range(5, 35)] for run_s in runs_s
        ]
        runs = [run(tmp_path / name / str(n), rows) for n, rows in enumerate(made)]
        return Arm(name, name, runs)

    slo = Slo.load(slo_file(tmp_path))
    base = arm("none", 1.0, 1.0)
    (alike_low, alike_high) = compare([base, arm("same", 0.5, 0.5)], slo)["same"][CI]
    (low, high) = compare([base, arm("cpu", 0.35, 0.7)], slo)["cpu"][CI]
    assert alike_high - alike_low < 0.1
    assert (low, high) == (pytest.approx(1 / 0.7, rel=0.1), pytest.approx(1 / 0.35, rel=0.1))


CI = "ttft_p50_ratio_ci"


def test_too_few_requests_are_no_answer(tmp_path):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)[:2]
    made[1].runs[0] = run(tmp_path / "few", [row(i) for i in range(5, 24)], counters=COUNTED)
    slo = Slo.load(slo_file(tmp_path))
    verdict = judge(made, compare(made, slo), slo)
    assert verdict.lines[0].startswith("NOT KNOWN: CPU tier. Too few requests of rounds 2 and")
    assert not verdict.holds


@pytest.mark.parametrize(
    ("counters", "says"),
    [
        (
            COUNTED,
            "YES: the tiers serve this load. They held 2,600 of 5,000 prompt tokens (52%), n",
        ),
        (FITS, "YOUR LOAD NEVER REACHED THE TIERS: 0 of 6,000 prompt tokens, n = 30 requests. 83%"),
        (
            NOT_ASKED,
            "YOUR LOAD NEVER REACHED THE TIERS: 0 of 6,000 prompt tokens, n = 30 requests. No",
        ),
        (
            NEW,
            "YOUR LOAD NEVER REACHED THE TIERS: 0 of 6,000 prompt tokens, n = 30 requests. No pr",
        ),
        ((), "NOT KNOWN: the server's page /metrics has no counters of vLLM"),
    ],
)
def test_a_run_whose_tiers_did_nothing_is_never_green(tmp_path, counters, says):
    slo = Slo.load(slo_file(tmp_path))
    measured = run(tmp_path / "r", [row(i) for i in range(5, 35)], counters=counters)
    arm = Arm("server", "it", [measured])
    verdict = judge([arm], compare([arm], slo), slo)
    assert verdict.lines[0].startswith(says)
    assert verdict.holds == (counters == COUNTED)
    assert "All 1 thresholds hold." in verdict.text  # they say nothing about the cache


def test_each_sentence_names_its_population_and_how_many(tmp_path):
    rows = [row(i / 10, round_=1, ttft_s=1.0) for i in range(20)]  # before 5 s: the ramp-up
    rows += [row(6 + i / 10) for i in range(30)]
    slo = Slo.load(slo_file(tmp_path))
    arm = Arm("server", "it", [run(tmp_path / "r", rows, counters=COUNTED)])
    text = judge([arm], compare([arm], slo), slo).text
    assert "50 requests in the whole run, none failed." in text
    first = "mean 1,000 ms, median 1,000 ms, p95 1,000 ms (n = 20)"
    assert f"Round 1, whole run: time to first token {first}." in text
    later = "mean 100 ms, median 100 ms, p95 100 ms (n = 30)"
    assert f"After the ramp-up: time to first token {later}." in text


def test_hits_and_misses_have_each_their_times(tmp_path):
    """By what the server said of each request; one that it said nothing of is in neither."""
    rows = [row(6 + i / 10) | {"cached_tokens": 100} for i in range(20)]
    rows += [row(9 + i / 10, ttft_s=1.0) | {"cached_tokens": 99} for i in range(25)]
    rows += [row(12, ttft_s=7.0)]
    slo = Slo.load(slo_file(tmp_path))
    arm = Arm("server", "it", [run(tmp_path / "r", rows, counters=COUNTED)])
    text = judge([arm], compare([arm], slo), slo).text
    assert "from a cache (the engine's own or a tier): time to first token mean 100 ms, " in text
    assert "median 100 ms, p95 100 ms (n = 20)." in text
    misses = "mean 1,000 ms, median 1,000 ms, p95 1,000 ms (n = 25)."
    assert f"Whole run, less than half of it: time to first token {misses}" in text


def test_a_server_that_does_not_say_what_it_had_is_told_so(tmp_path):
    slo = Slo.load(slo_file(tmp_path))
    arm = Arm("server", "it", [run(tmp_path / "r", [row(i) for i in range(5, 35)])])
    text = judge([arm], compare([arm], slo), slo).text
    assert "vLLM says it with --enable-prompt-tokens-details." in text


def test_a_cache_that_held_all_is_said_with_its_size(tmp_path):
    slo = Slo.load(slo_file(tmp_path))
    arm = Arm("server", "it", [run(tmp_path / "r", [row(i) for i in range(30)], counters=FITS)])
    comparison = compare([arm], slo)
    comparison["server"]["engine_cache_tokens"] = 14336.0
    assert "own cache, which holds 14,336 tokens. Send more" in judge([arm], comparison, slo).text
    comparison["server"]["most"]["vllm:kv_cache_usage_perc"] = 0.5
    assert (
        "holds 14,336 tokens and was at most 50% full. Send" in judge([arm], comparison, slo).text
    )


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("name", ["none", "cpu"])
def test_a_variant_that_fell_behind_is_said(tmp_path, name):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)
    slo = Slo.load(slo_file(tmp_path))
    comparison = compare(made, slo)
    assert "keep up" not in judge(made, comparison, slo).text
    comparison[name] |= {"offered_qps": 10.0}
    about = {arm.name: arm.about for arm in made}[name]
    said = [line for line in judge(made, comparison, slo).lines if "keep up" in line]
    assert len(said) == 1
    assert said[0].startswith(f"{about} did not keep up: it answered")


def test_a_client_that_is_the_bottleneck_is_said_and_fails(tmp_path):
    path = slo_file(tmp_path)
    path.write_text(SLO + '[[run]]\nfigure = "client_lag_p95_s"\nmax = 0.0005\n')
    arm = Arm("server", "it", [run(tmp_path / "r", [row(i) for i in range(5, 20)])])
    slo = Slo.load(path)
    verdict = judge([arm], compare([arm], slo), slo)
    assert not verdict.holds
    assert "The client was the bottleneck" in verdict.text


def test_a_figure_that_is_missing_does_not_hold(tmp_path):
    slo = Slo.load(slo_file(tmp_path))
    checks = slo.check(slo.compare, {"none": {}, "cpu": {"external_hit_rate": None}})
    assert [str(check) for check in checks if not check.holds] == [
        "cpu: gain in time to first token, median of rounds 2 and later was not measured, "
        "expected at least 3 times",
        "cpu: share that the tiers had of what the engine's own cache lacked was not measured, "
        "expected at least 80.0%",
    ]


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("name", ["slo.toml", "slo-short.toml"])
def test_thresholds_that_come_with_this_name_figures_that_there_are(tmp_path, name):
    from loadtests import slo as module

    slo = Slo.load(tmp_path.joinpath(module.__file__).parent / name)
    comparison = compare(arms(tmp_path, base_s=1.0, cpu_s=0.1), slo)
    figures = set().union(*comparison.values())
    assert {t.figure for t in (*slo.run, *slo.compare)} <= figures
    assert slo.compare
