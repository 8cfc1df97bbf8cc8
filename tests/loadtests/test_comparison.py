"""Figures, hit rates, ratios and the verdict, from rows whose answers are known."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from loadtests import report
from loadtests.comparison import Arm, compare, judge
from loadtests.figures import figures, load, percentiles
from loadtests.hits import COUNTERS, hits_by_phase, hits_over_time
from loadtests.report import write_report
from loadtests.scrape import ENGINE_TOKENS, samples
from loadtests.slo import Goodput, Slo

GOODPUT = Goodput(ttft_s=0.5, itl_s=0.02)
SLO = """
[goodput]
ttft_s = 0.5
itl_s = 0.02
[[run]]
figure = "failure_rate"
max = 0.1
[[compare]]
variant = "cpu"
figure = "ttft_p50_ratio"
min = 3.0
[[compare]]
variant = "cpu"
figure = "external_hit_rate"
min = 0.8
[[compare]]
variant = "disk"
figure = "first_round_p50_ratio"
min = 2.0
"""


def row(number, *, round_=2, ttft_s=0.1, outcome="ok", late=False, gap_s=0.01):
    ok = outcome == "ok"
    return {
        "worker": 0,
        "user_id": number,
        "question": round_,
        "round": round_,
        "intended_s": number - 0.5 * late,
        "due_s": number - 0.25 * late,
        "late": late,
        "started_s": float(number),
        "ended_s": number + ttft_s + 2 * gap_s,
        "outcome": outcome,
        "detail": "",
        "ttft_s": ttft_s if ok else None,
        "tpot_s": gap_s if ok else None,
        "e2e_s": ttft_s + 2 * gap_s,
        "gaps_s": [gap_s, gap_s] if ok else [],
        "prompt_tokens": 100 if ok else None,
        "completion_tokens": 3 if ok else None,
        "cached_tokens": None,
    }


def run(directory, rows, *, counters=(), lasted_s=20.0, steady_from_s=5.0, ended_by="time"):
    directory.mkdir(parents=True)
    meta = {"workload": "multi-round", "host": "http://x", "offered_qps": 1.0, "users": 2}
    meta |= {"lasted_s": lasted_s, "steady_from_s": steady_from_s, "ended_by": ended_by}
    (directory / "meta.json").write_text(json.dumps(meta))
    client = [{"at_s": i, "lag_s": 0.001, "cpu_percent": 5, "memory_mib": 80} for i in range(20)]
    metrics = [{"at_s": at_s} | dict(zip(COUNTERS, c, strict=False)) for at_s, *c in counters]
    for name, lines in (("rows", rows), ("client", client), ("metrics", metrics)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return load(directory)


def slo_file(tmp_path):
    path = tmp_path / "slo.toml"
    path.write_text(SLO)
    return path


def test_figures_count_what_is_steady_and_answered(tmp_path):
    # The ramp-up: neither its times nor its rate count.
    rows = [row(0, round_=1, ttft_s=9.0) for _ in range(20)]
    rows += [row(i, ttft_s=0.1 if i % 2 else 0.3) for i in range(5, 15)]
    rows += [row(15) for _ in range(10)]
    rows += [row(15, outcome="stalled"), row(16, outcome="HTTP 503"), row(17, outcome="dropped")]
    rows += [row(18, late=True), row(19, gap_s=0.05)]
    found = figures([run(tmp_path / "r", rows)], GOODPUT)
    assert (found["requests"], found["dropped"]) == (44, 1)
    assert found["failures"] == {"stalled": 1, "HTTP 503": 1}
    assert found["failure_rate"] == pytest.approx(2 / 44)
    assert found["late_sends"] == 1
    assert found["achieved_qps"] == pytest.approx(25 / 15)
    assert found["answered_qps"] == pytest.approx(22 / 15)
    assert found["answer_tokens_per_s"] == pytest.approx(66 / 15)
    assert found["ttft_s"]["p50"] == pytest.approx(0.1)
    assert found["ttft_first_round_s"]["p50"] == pytest.approx(9.0)
    assert found["goodput_share"] == pytest.approx(21 / 22)
    assert found["intended_to_first_token_s"]["p99"] > 0.5  # the late one, by the plan
    assert found["ttft_s"]["p99"] < 0.31  # by its send


def test_percentiles_are_exact_and_unknown_without_values():
    values = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert percentiles(range(101)) == {"n": 101, "mean": 50, **values}
    assert percentiles([])["p50"] is None


def test_of_fewer_than_twenty_there_is_a_mean_and_no_percentile():
    few, enough = percentiles([None, *[2.0] * 19]), percentiles([2.0] * 20)
    assert (few["n"], few["mean"], few["p50"], few["p95"]) == (19, 2.0, None, None)
    assert (enough["n"], enough["p95"]) == (20, 2.0)


COUNTED = [  # at_s, then the four counters, which began before the run
    (-0.5, 1000, 500, 500, 100),
    (2.0, 1400, 600, 800, 100),
    (5.0, 2000, 700, 1300, 300),
    (10.0, 4000, 1200, 2800, 1500),
    (15.0, 6000, 1700, 4300, 2700),
]


def test_hit_rates_by_phase_have_each_their_own_denominator(tmp_path):
    measured = run(tmp_path / "r", [], counters=COUNTED)
    phases = hits_by_phase(measured.metrics, 5.0)
    assert phases.keys() == {"whole run", "ramp-up", "steady"}
    whole, ramp, steady = phases["whole run"], phases["ramp-up"], phases["steady"]
    assert whole == ramp + steady
    assert whole.device_rate == pytest.approx(1200 / 5000)
    assert steady.device_rate == pytest.approx(1000 / 4000)
    assert steady.external_rate == pytest.approx(2400 / 3000)
    assert steady.computed_rate == pytest.approx(1 - 3400 / 4000)
    over_time = hits_over_time(measured.metrics, 5.0)
    assert over_time["external"].iloc[-1] == pytest.approx(1200 / 2000)


def test_a_server_without_metrics_has_no_hit_rates(tmp_path):
    assert hits_by_phase(run(tmp_path / "r", []).metrics, 5.0) == {}


def arms(tmp_path, *, base_s, cpu_s, disk_first_s=0.1, ended_by="time"):
    noise = np.random.default_rng(1)

    def rows(later_s, first_s):
        drawn = noise.normal(1, 0.05, 60)
        return [
            row(i, round_=1 if i % 3 == 0 else 2, ttft_s=(later_s, first_s)[i % 3 == 0] * drawn[i])
            for i in range(60)
        ]

    def control(whole_s):
        return [row(i, round_=1, ttft_s=whole_s * noise.normal(1, 0.01)) for i in range(30)]

    def made(name, about, later_s, first_s, whole_s):
        one = run(tmp_path / name, rows(later_s, first_s), counters=COUNTED, ended_by=ended_by)
        return Arm(name, about, [one], [run(tmp_path / f"{name}-c", control(whole_s))])

    return [
        made("none", "vLLM without offload", base_s, base_s, 1.0),
        made("cpu", "CPU tier", cpu_s, base_s, 1.03),
        made("disk", "disk tier after a restart", cpu_s, disk_first_s, 1.0),
    ]


def test_a_gain_is_said_with_its_confidence(tmp_path):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)
    slo = Slo.load(slo_file(tmp_path))
    found = compare(made, slo)
    cpu, disk = found["cpu"], found["disk"]
    assert cpu["ttft_p50_ratio"] == pytest.approx(10, rel=0.1)
    low, high = cpu["ttft_p50_ratio_ci"]
    assert 9 < low < cpu["ttft_p50_ratio"] < high < 11
    assert disk["first_round_p50_ratio"] == pytest.approx(10, rel=0.15)
    assert cpu["no_reuse_overhead"] == pytest.approx(0.03, abs=0.02)
    assert cpu["no_reuse_overhead_ci"][0] < cpu["no_reuse_overhead"]
    verdict = judge(made, found, slo)
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


# Counters of a run in which all was found in the engine's own cache, and of one without a tier.
FITS = [(0.0, 0, 0, 0, 0), (15.0, 6000, 5000, 1000, 0)]
NOT_ASKED = [(0.0, 0, 0, 0, 0), (15.0, 6000, 5000, 0, 0)]
NEW = [(0.0, 0, 0, 0, 0), (15.0, 6000, 0, 6000, 0)]


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
    rows = [row(6 + i / 10) | {"cached_tokens": 50} for i in range(20)]
    rows += [row(9 + i / 10, ttft_s=1.0) | {"cached_tokens": 49} for i in range(25)]
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
    found = compare([arm], slo)
    found["server"]["engine_cache_tokens"] = 14336.0
    assert "own cache, which holds 14,336 tokens. Send more" in judge([arm], found, slo).text
    found["server"]["most"]["vllm:kv_cache_usage_perc"] = 0.5
    assert "holds 14,336 tokens and was at most 50% full. Send" in judge([arm], found, slo).text


def test_the_engines_cache_is_read_from_its_page():
    info = 'vllm:cache_config_info{block_size="128",engine="%d",num_gpu_blocks="%s"} 1.0\n'
    assert samples(info % (0, "40") + info % (1, "40")) == {ENGINE_TOKENS: 10240.0}
    assert samples(info % (0, "None")) == {}


@pytest.mark.parametrize("name", ["none", "cpu"])
def test_a_variant_that_fell_behind_is_said(tmp_path, name):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)
    slo = Slo.load(slo_file(tmp_path))
    found = compare(made, slo)
    assert "keep up" not in judge(made, found, slo).text
    found[name] |= {"offered_qps": 10.0}
    about = {arm.name: arm.about for arm in made}[name]
    said = [line for line in judge(made, found, slo).lines if "keep up" in line]
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


@pytest.mark.parametrize("name", ["slo.toml", "slo-short.toml"])
def test_thresholds_that_come_with_this_name_figures_that_there_are(tmp_path, name):
    from loadtests import slo as module

    slo = Slo.load(tmp_path.joinpath(module.__file__).parent / name)
    found = compare(arms(tmp_path, base_s=1.0, cpu_s=0.1), slo)
    known = set().union(*found.values())
    assert {t.figure for t in (*slo.run, *slo.compare)} <= known
    assert slo.compare


def test_the_report_of_a_comparison_is_whole(tmp_path):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1, ended_by="server gone")
    write_report(made, tmp_path, slo_file(tmp_path), facts={"command": "make <it>"})
    page = (tmp_path / "report.html").read_text()
    verdict = json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert page.index("<strong>YES:</strong> CPU tier.") < page.index("<h2>")
    assert "none: the run was cut short (server gone)." in verdict
    assert "make &lt;it&gt;" in page or "make \\u003cit\\u003e" in page
    assert page.count("data:image/png") == 4
    assert page.index("In short") < page.index("Thresholds")
    width, height = struct.unpack(">II", (tmp_path / "summary.png").read_bytes()[16:24])
    assert width > height > 400


def test_a_picture_that_fails_costs_the_picture_alone(tmp_path, monkeypatch):
    def broken(*_):
        assert (tmp_path / "summary.json").exists()
        raise OverflowError("too wide")

    monkeypatch.setattr(report, "draw", broken)
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)
    write_report(made, tmp_path, slo_file(tmp_path), facts={})
    assert "OverflowError" in (tmp_path / "report.html").read_text()
