"""Figures and hit rates, from rows and counters whose answers are known."""

from __future__ import annotations

import pytest
from measured_runs import COUNTED, row, run

from loadtests.figures import figures, percentiles
from loadtests.hits import hits_by_phase, hits_over_time
from loadtests.scrape import ENGINE_TOKENS, samples
from loadtests.slo import Goodput

GOODPUT = Goodput(ttft_s=0.5, itl_s=0.02)


def test_figures_count_what_is_steady_and_answered(tmp_path):
    # The ramp-up: neither its times nor its rate count.
    rows = [row(0, round_=1, ttft_s=9.0) for _ in range(20)]
    rows += [row(i, ttft_s=0.1 if i % 2 else 0.3) for i in range(5, 15)]
    rows += [row(15) for _ in range(10)]
    rows += [row(15, outcome="stalled"), row(16, outcome="HTTP 503"), row(17, outcome="dropped")]
    rows += [row(18, late=True), row(19, gap_s=0.05)]
    steady = figures([run(tmp_path / "r", rows)], GOODPUT)
    assert (steady["requests"], steady["dropped"]) == (44, 1)
    assert steady["failures"] == {"stalled": 1, "HTTP 503": 1}
    assert steady["failure_rate"] == pytest.approx(2 / 44)
    assert steady["late_sends"] == 1
    assert steady["achieved_qps"] == pytest.approx(25 / 15)
    assert steady["answered_qps"] == pytest.approx(22 / 15)
    assert steady["answer_tokens_per_s"] == pytest.approx(66 / 15)
    assert steady["ttft_s"]["p50"] == pytest.approx(0.1)
    assert steady["ttft_first_round_s"]["p50"] == pytest.approx(9.0)
    assert steady["goodput_share"] == pytest.approx(21 / 22)
    assert steady["intended_to_first_token_s"]["p99"] > 0.5  # the late one, by the plan
    assert steady["ttft_s"]["p99"] < 0.31  # by its send


def test_percentiles_are_exact_and_unknown_without_values():
    values = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert percentiles(range(101)) == {"n": 101, "mean": 50, **values}
    assert percentiles([])["p50"] is None


def test_of_fewer_than_twenty_there_is_a_mean_and_no_percentile():
    few, enough = percentiles([None, *[2.0] * 19]), percentiles([2.0] * 20)
    assert (few["n"], few["mean"], few["p50"], few["p95"]) == (19, 2.0, None, None)
    assert (enough["n"], enough["p95"]) == (20, 2.0)


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


def test_the_engines_cache_is_read_from_its_page():
    info = 'vllm:cache_config_info{block_size="128",engine="%d",num_gpu_blocks="%s"} 1.0\n'
    assert samples(info % (0, "40") + info % (1, "40")) == {ENGINE_TOKENS: 10240.0}
    assert samples(info % (0, "None")) == {}
