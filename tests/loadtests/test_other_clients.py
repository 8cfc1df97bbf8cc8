"""The check by other clients: what they leave is read right, and a difference is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtests.other_clients.__main__ import Agreement, app, measure
from loadtests.other_clients.clients import Client, Load, clients
from loadtests.other_clients.counts import Counts, counts_of

PAGE = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0"} 4.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0"} 2.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 100.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 30.0
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="0"} 20.0
"""
LOAD = Load(
    url="http://x",
    model="m",
    tokenizer="t",
    users=5,
    rounds=4,
    qps=0.5,
    shared=100,
    history=900,
    answer=8,
    seconds=40,
)


def test_a_page_of_metrics_is_read():
    counts = counts_of(PAGE)
    assert counts == Counts(4, 2.0, 100, 30, 20)
    assert counts.mean_s == 0.5
    assert (counts - Counts(2, 0.5, 60, 30, 0)) == Counts(2, 1.5, 40, 0, 20)


@pytest.mark.parametrize(
    ("mean_s", "holds"), [(0.5, True), (0.52, True), (0.48, True), (0.53, False), (0.47, False)]
)
def test_within_five_percent_is_agreement(mean_s, holds):
    agreement = Agreement("client", 4, mean_s, counts_of(PAGE))
    assert agreement.holds == holds
    assert agreement.difference == pytest.approx(mean_s / 0.5 - 1)


def test_a_server_that_counted_nothing_agrees_with_nobody():
    assert not Agreement("client", 4, 0.5, Counts()).holds


def named(name, **options):
    made = clients(LOAD, **({"multi_round_qa": None, "aiperf": "aiperf"} | options))
    return next(client for client in made if client.name == name)


def test_what_each_client_leaves_is_read(tmp_path):
    rows = [{"outcome": "ok", "ttft_s": 0.2}, {"outcome": "ok", "ttft_s": 0.4}]
    rows.append({"outcome": "dropped", "ttft_s": 9.0})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert named("this load test").read(tmp_path) == (2, pytest.approx(0.3))
    (tmp_path / "summary.csv").write_text("prompt_tokens,ttft\n1,0.1\n1,0.3\n")
    assert named("LMCache multi-round-qa").read(tmp_path) == (2, pytest.approx(0.2))
    (tmp_path / "result.json").write_text('{"completed": 3, "mean_ttft_ms": 250}')
    assert named("vllm bench serve").read(tmp_path) == (3, 0.25)
    (tmp_path / "profile_export_aiperf.json").write_text(
        '{"request_count": {"avg": 7.0}, "time_to_first_token": {"avg": 120.0, "unit": "ms"}}'
    )
    assert named("AIPerf").read(tmp_path) == (7, 0.12)


def test_ours_and_lmcaches_get_the_same_load(tmp_path):
    ours = named("this load test").command(tmp_path)
    theirs = named("LMCache multi-round-qa").command(tmp_path)
    for option in ("--qps", "--num-rounds", "--shared-system-prompt", "--user-history-prompt"):
        assert ours[ours.index(option) + 1] == theirs[theirs.index(option) + 1]
    assert ours[ours.index("--users") + 1] == theirs[theirs.index("--num-users") + 1]


@pytest.mark.parametrize("name", ["LMCache multi-round-qa", "AIPerf"])
def test_a_client_that_is_not_here_is_said_and_left_out(name, tmp_path):
    said = measure(named(name, aiperf=None), LOAD, tmp_path / "out")
    assert said.startswith("not here (--")
    assert not (tmp_path / "out").exists()


def test_a_client_that_fails_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("loadtests.other_clients.counts.Watch._read", lambda self: Counts())
    command = [sys.executable, "-c", "raise SystemExit('no server')"]
    client = Client("c", lambda _: command, named("vllm bench serve").read)
    said = measure(client, LOAD, tmp_path / "out")
    assert said.startswith("failed (FileNotFoundError")
    assert "no server" in Path(tmp_path / "out" / "log").read_text()


def test_a_server_that_is_away_is_one_line():
    ended = CliRunner().invoke(app, ["--host", "http://127.0.0.1:9"])
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
