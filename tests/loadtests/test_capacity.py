"""The capacity sweep: its search, its judgement of a step, its result, and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from math import gcd
from pathlib import Path

import pandas as pd
import pytest
from stub_process import stub_server
from typer.testing import CliRunner

from loadtests.capacity.__main__ import app
from loadtests.capacity.chat import HERE, SERVERS
from loadtests.capacity.result import most_users, verdict, write
from loadtests.capacity.search import search
from loadtests.capacity.step import Limits, Step, delays_s, measure
from loadtests.figures import Measured
from loadtests.slo import Slo

ROOT = Path(__file__).parents[2]
LIMITS = Limits(ttft_s=2, itl_s=0.2)


def tried(capacity, *, start=4, most=4096, within=0.0, rounds=8):
    numbers = []

    def fits(users):
        numbers.append(users)
        return users <= capacity

    search(
        fits,
        start=start,
        most=most,
        within=within,
        allowed=lambda users: gcd(users, rounds - 1) == 1,
    )
    return numbers


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 8, 13, 37, 100])
def test_the_search_finds_the_largest_number_that_fits(capacity):
    numbers = tried(capacity)
    assert len(numbers) == len(set(numbers))
    allowed = [users for users in range(1, capacity + 1) if gcd(users, 7) == 1]
    assert max(users for users in numbers if users <= capacity) == allowed[-1]


def test_the_search_ends_below_one_user():
    assert tried(0)[-1] == 1


@pytest.mark.parametrize("rounds", [2, 3, 5, 7, 8, 31])
def test_users_whose_sends_fall_together_are_not_tried(rounds):
    assert all(gcd(users, rounds - 1) == 1 for users in tried(23, rounds=rounds))


def test_the_search_is_as_near_as_asked_and_not_nearer():
    numbers = tried(70, within=0.1)
    good, bad = (max(u for u in numbers if u <= 70), min(u for u in numbers if u > 70))
    assert bad - good <= 0.1 * good
    assert len(numbers) < len(tried(70))


def test_the_search_ends_at_the_most():
    assert tried(1000, most=20) == [4, 8, 16]


def row(**changes):
    times = {"intended_s": 10.0, "started_s": 10.0, "ttft_s": 0.5, "ended_s": 11.0}
    return {"outcome": "ok", "tpot_s": 0.1, "completion_tokens": 3, **times, **changes}


def run(rows, *, lag_s=0.01):
    return Measured(
        meta={"users": 4, "offered_qps": 0.5, "steady_from_s": 8.0},
        rows=pd.DataFrame(rows),
        client=pd.DataFrame({"lag_s": [lag_s]}),
        metrics=pd.DataFrame({"at_s": []}),
    )


def test_a_delay_counts_from_the_plan():
    rows = pd.DataFrame([row(intended_s=7.0)])
    assert delays_s(rows, 2).tolist() == [3.5]


def test_a_request_that_the_end_cut_off_counts_once_it_is_over_the_limit():
    cut = {"outcome": "dropped", "ttft_s": None}
    rows = pd.DataFrame([row(), row(**cut, ended_s=14.0), row(**cut, ended_s=11.0)])
    assert delays_s(rows, 2).tolist() == [0.5, 4.0]


def test_a_step_that_keeps_all_limits_fits():
    step = measure(run([row()] * 20), LIMITS, stopped_early=False)
    assert step.fits
    assert (step.requests, step.ttft_p95_s, step.failure_rate) == (20, 0.5, 0.0)


@pytest.mark.parametrize(
    ("rows", "options", "miss"),
    [
        ([row()] * 18 + [row(ttft_s=3.0)] * 2, {}, "TTFT p95 3.00 s, of at most 2 s"),
        ([row(tpot_s=0.3)] * 20, {}, "ITL mean 300 ms"),
        ([row()] * 20 + [row(outcome="HTTP 503", ttft_s=None)], {}, "5% failed"),
        ([row()] * 19, {}, "19 requests, of at least 20"),
        ([row(started_s=5.0)] * 20, {}, "0 requests"),
        ([row()] * 20, {"lag_s": 0.3}, "the client was 0.30 s late"),
    ],
)
def test_a_step_that_misses_says_why(rows, options, miss):
    step = measure(run(rows, **options), LIMITS, stopped_early=False)
    assert not step.fits
    assert miss in step.misses[0]


def test_no_percentile_of_fewer_than_20_requests():
    assert measure(run([row()] * 19), LIMITS, stopped_early=False).ttft_p95_s is None


def step(users, *, fits=True):
    return Step(
        users=users,
        offered_qps=users / 8,
        requests=40,
        ttft_mean_s=0.5,
        ttft_p50_s=0.4,
        ttft_p95_s=1.0 if fits else 3.0,
        itl_mean_s=0.05,
        failure_rate=0.0,
        device_hit_rate=0.1,
        external_hit_rate=None,
        client_lag_p95_s=0.01,
        stopped_early=False,
        misses=[] if fits else ["TTFT p95 3.00 s, of at most 2 s"],
    )


def test_a_number_that_fits_above_one_that_does_not_is_no_capacity():
    assert most_users([step(4), step(8, fits=False), step(16)]) == (4, 8)


def test_the_verdict_is_one_line():
    none = [step(4), step(8, fits=False), step(6)]
    cpu = [step(4), step(8), step(14), step(16, fits=False)]
    assert verdict({"none": none, "cpu": cpu}) == "none: 6 users, cpu: 14 users: 2.3 times"
    assert verdict({"none": none, "cpu": [step(16)]}) == (
        "none: 6 users, cpu: at least 16 users: at least 2.7 times"
    )
    assert verdict({"none": [step(1, fits=False)], "cpu": cpu}) == "none: 0 users, cpu: 14 users"


def test_the_result_has_every_step_and_its_files_are_whole(tmp_path):
    write({"none": [step(4), step(8, fits=False)]}, LIMITS, {"date": "today"}, tmp_path)
    result = json.loads((tmp_path / "capacity.json").read_text())
    assert result["variants"]["none"]["most_users"] == 4
    assert [s["users"] for s in result["variants"]["none"]["steps"]] == [4, 8]
    assert "no: TTFT p95 3.00 s" in (tmp_path / "capacity.md").read_text()
    assert (tmp_path / "capacity.png").stat().st_size > 10_000
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]


def test_limits_come_from_the_file_of_thresholds():
    limits = Limits.of(Slo.load(ROOT / "loadtests" / "slo.toml"))
    assert limits == Limits(ttft_s=2, itl_s=0.2, failure_rate=0.01, client_lag_s=0.1)


@pytest.mark.parametrize("chat", [HERE, SERVERS])
def test_a_step_has_time_for_its_requests(chat):
    for users in (1, 4, 64):
        steady_s = chat.duration_s(users) - chat.gap_s
        assert chat.offered_qps(users) * steady_s >= chat.requests - 1e-9
        assert steady_s >= 2 * chat.gap_s


def capacity(*arguments):
    command = [sys.executable, "-m", "loadtests.capacity", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://x:8000"], "expected variant=http://..."),
        (["--url", "none=http://x", "--variants", "none,cpu"], "found no --url for ['cpu']"),
        (["--variants", "none,disk"], "which is about restarts"),
        (["--variants", "nonsense"], "found variants ['nonsense']"),
        (["--slo", "missing.toml"], "found --slo missing.toml"),
        (["--again", "missing"], "found no capacity.json in missing"),
        (["--compose", "missing.yaml"], "found no compose file missing.yaml"),
        (["--report-dir", "/proc/x"], "a directory that can't be made"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(arguments, said):
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.alone
def test_a_sweep_over_servers_that_run(tmp_path):
    slo = tmp_path / "slo.toml"
    slo.write_text("[goodput]\nttft_s = 0.3\nitl_s = 0.1\n")
    load = ["--gap-s=0.5", "--requests=20", "--start=1", "--most=2", "--answer-tokens=4"]
    texts = ["--shared-words=20", "--history-words=20"]
    where = ["--report-dir", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    with stub_server("--first-ms", "500") as slow, stub_server("--first-ms", "20") as fast:
        urls = ["--url", f"none={slow.url}", "--url", f"cpu={fast.url}"]
        ended = capacity(*urls, *load, *texts, *where, "--slo", str(slo))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "none: 0 users, cpu: at least 2 users"
    result = json.loads((tmp_path / "out" / "capacity.json").read_text())
    (none,) = result["variants"]["none"]["steps"]
    assert none["stopped_early"]
    assert [s["users"] for s in result["variants"]["cpu"]["steps"]] == [1, 2]
    assert result["facts"]["a user"]["gap_s"] == 0.5
    slo.write_text("[goodput]\nttft_s = 3\nitl_s = 0.1\n")
    again = capacity("--again", str(tmp_path / "out"), "--slo", str(slo))
    assert again.returncode == 0, again.stderr
    assert "cpu: at least 2 users" in again.stdout
