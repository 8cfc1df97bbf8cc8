"""Measurements that say nothing: each report says so, with the reason, and none ends with 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "loadtests"))

from measured_runs import COUNTED, row, run

from loadtests import comparison, report
from loadtests.capacity.__main__ import app
from loadtests.capacity.runner import BrokenStepError, judge
from loadtests.capacity.step import Limits
from loadtests.comparison import Arm
from loadtests.report import report_run, write_report
from loadtests.scrape import STARTED, samples
from loadtests.traces import summary

SLO = "[goodput]\nttft_s = 9\nitl_s = 9\n"
LIMITS = Limits(ttft_s=9, itl_s=9)
GOOD = [row(6 + i / 10) for i in range(30)]


def failing(failed, whole):
    return GOOD[:whole] + [row(9 + i, outcome="HTTP 500") for i in range(failed)]


RESTARTED = [(0, 10**6, 10, 10**6, 10**5), (5, 10**6 + 3000, 900, 10**6, 101000), (9, 500, 0, 9, 0)]
FOREIGN = [(0, 0, 0, 0, 0), (15, 17449, 0, 486000, 405000)]
BUSY = [(0, 0, 0, 0, 0), (15, 60000, 100, 59900, 50000)]
IMPOSSIBLE = [(0, 0, 0, 0, 0), (15, 5000, 100, 2000, 2500)]
# Rows, counters, and what is said of them.
CASES = {
    "most failed": (failing(77, 8), COUNTED, "77 of 85 requests failed"),
    "a third failed": (failing(13, 30), COUNTED, "13 of 43 requests failed"),
    "all failed": (failing(30, 0), COUNTED, "none of 30 requests was answered"),
    "no request": ([], COUNTED, "none of 0 requests was answered"),
    "only dropped": ([row(6, outcome="dropped")], COUNTED, "nothing was measured"),
    "restarted": (GOOD, RESTARTED, "was started anew"),
    "foreign hits": (GOOD, FOREIGN, "Other clients used it"),
    "foreign tokens": (GOOD, BUSY, "60,000 prompt tokens, of 6,000 sent"),
    "more hits than questions": (GOOD, IMPOSSIBLE, "Other clients used it"),
}
OF_COUNTERS = [name for name, case in CASES.items() if case[0] is GOOD]


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Most of a report's time is theirs, and the answer is made before."""
    monkeypatch.setattr(report, "draw", lambda *_: [])
    monkeypatch.setattr(report, "draw_summary", lambda *_: None)


@pytest.fixture(autouse=True)
def with_few_resamples(monkeypatch):
    """No answer here hangs on the ends of an interval, whose drawing takes most of the time."""
    monkeypatch.setattr(comparison, "RESAMPLES", 100)


@pytest.fixture
def slo(tmp_path):
    path = tmp_path / "slo.toml"
    path.write_text(SLO)
    return path


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_is_not_known(tmp_path, slo, case):
    rows, counters, why = case
    run(tmp_path / "run", rows, counters=counters)
    verdict = report_run(tmp_path / "run", slo)
    assert verdict.lines[0].startswith("NOT KNOWN: ")
    assert why in verdict.lines[0]
    assert not verdict.holds
    said = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [answer["answer"] for answer in said["answers"]] == ["NOT KNOWN"]
    assert not said["holds"]


@pytest.mark.parametrize("spoilt", ["none", "cpu"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_comparison_is_not_known(tmp_path, slo, case, spoilt):
    rows, counters, why = case
    arms = []
    for name, ttft_s in (("none", 1.0), ("cpu", 0.1)):
        good = [row(6 + i / 10, ttft_s=ttft_s) for i in range(30)]
        sent, counted = (rows, counters) if name == spoilt else (good, COUNTED)
        arms.append(Arm(name, name, [run(tmp_path / name, sent, counters=counted)]))
    verdict = write_report(arms, tmp_path, slo, facts={})
    assert verdict.lines[0].startswith(f"NOT KNOWN: cpu. In {spoilt}: ")
    assert why in verdict.lines[0]
    assert not verdict.holds


def test_the_control_counts_too(tmp_path, slo):
    arms = [
        Arm(
            name,
            name,
            [
                run(
                    tmp_path / name,
                    [row(6 + i / 10, ttft_s=s) for i in range(30)],
                    counters=COUNTED,
                )
            ],
            [run(tmp_path / f"{name}-c", failing(20, 20))],
        )
        for name, s in (("none", 1.0), ("cpu", 0.1))
    ]
    assert "20 of 40 requests failed" in write_report(arms, tmp_path, slo, facts={}).lines[0]


@pytest.mark.parametrize("name", OF_COUNTERS)
def test_a_step_of_capacity_is_not_known(tmp_path, slo, name):
    rows, counters, why = CASES[name]
    run(tmp_path / "rows" / "none-2", rows, counters=counters)
    with pytest.raises(BrokenStepError, match=f"NOT KNOWN whether it fits: .*{why}"):
        judge(tmp_path / "rows" / "none-2", LIMITS)
    (tmp_path / "capacity.json").write_text('{"facts": {}}')
    ended = CliRunner().invoke(
        app, ["--again", str(tmp_path), "--slo", str(slo), "--work", str(tmp_path / "w")]
    )
    assert ended.exit_code == 2  # nothing else was measured
    assert why in ended.stderr


def test_a_step_without_an_answer_does_not_fit(tmp_path):
    run(tmp_path / "rows", [], counters=COUNTED)
    assert "nothing was measured: no request ended" in judge(tmp_path / "rows", LIMITS).misses


@pytest.mark.parametrize("name", OF_COUNTERS)
def test_a_trace_is_not_known(tmp_path, monkeypatch, name):
    rows, counters, why = CASES[name]
    run(
        tmp_path / "run", [each | {"user_id": 1, "question": 1} for each in rows], counters=counters
    )
    trace = SimpleNamespace(sessions=[["sent"]], requests=["sent"], block_tokens=16)
    best = {"requests": 1, "prompt_tokens": 1, "distinct_tokens": 1}
    best |= {"reusable_share": 0.5, "chunk_tokens": 256}
    monkeypatch.setattr(summary, "planned", lambda _: trace)
    monkeypatch.setattr(summary, "best_reuse", lambda *_, **__: best)
    said = summary.summarise(tmp_path / "run", SimpleNamespace(init_user_id=0, chunk_tokens=256))
    assert "NOT KNOWN what was reused" in said
    assert why in said
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["reused"] is None


def test_a_restart_is_seen_by_the_time_of_the_process(tmp_path, slo):
    run(tmp_path / "run", GOOD, counters=COUNTED)
    file = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    text = "".join(json.dumps(s | {STARTED: float(s["at_s"] > 4)}) + "\n" for s in lines)
    file.write_text(text)
    assert "was started anew" in report_run(tmp_path / "run", slo).lines[0]


def test_the_time_of_an_exporter_is_not_the_engines():
    started = f"{STARTED} 5.0\n"
    assert samples(started + "hw_gpu_utilization_ratio 0.5\n") == {"hw_gpu_utilization_ratio": 0.5}
    assert samples(started + "vllm:num_requests_running 1\n")[STARTED] == 5.0


def test_a_sound_run_is_still_a_yes(tmp_path, slo):
    """One failure of thirty, and requests that the end cut off, are no doubt."""
    rows = failing(1, 30) + [row(14, outcome="dropped") for _ in range(5)]
    run(tmp_path / "run", rows, counters=COUNTED)
    verdict = report_run(tmp_path / "run", slo)
    assert verdict.lines[0].startswith("YES: ")
    assert verdict.holds
