"""Traces: their files, scaling, tokens, what could be reused of them, and a replay."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from stub_process import stub_server
from typer.testing import CliRunner

from loadtests.options import Options
from loadtests.session import play
from loadtests.traces.__main__ import app
from loadtests.traces.formats import read_trace
from loadtests.traces.reuse import best_reuse
from loadtests.traces.sessions import trace_sessions
from loadtests.traces.tokens import FIRST_ID, IDS, prompt_tokens
from loadtests.traces.trace import Request, Trace

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "loadtests" / "traces" / "example.jsonl"
AGENT = ROOT / "loadtests" / "traces" / "example-agent.json"
LINE = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(tokens, *blocks, at_s=0.0):
    return Request(at_s=at_s, input_tokens=tokens, output_tokens=1, blocks=blocks)


def test_mooncakes_times_are_milliseconds_and_its_blocks_512_tokens(tmp_path):
    late, early = {**LINE, "timestamp": 2500}, {**LINE, "timestamp": 500}
    trace = read_trace(written(tmp_path / "t.jsonl", late, early), "auto")
    assert [r.at_s for r in trace.requests] == [0.5, 2.5]
    assert (trace.block_tokens, trace.timed, len(trace.sessions)) == (512, True, 2)


def test_timed_traces_have_seconds_and_blocks_of_16_tokens(tmp_path):
    line = {"timestamp": 3, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace = read_trace(written(tmp_path / "t.jsonl", line), "auto")
    assert (trace.requests[0].at_s, trace.block_tokens) == (3, 16)


def test_agents_sessions_have_their_sub_agents_in_them():
    trace = read_trace(AGENT, "auto")
    (session,) = trace.sessions
    assert [r.at_s for r in session] == [0, 4, 8, 9, 10, 12, 16]
    assert not trace.timed
    assert not set(session[3].blocks) & set(session[2].blocks)  # names are of the agent alone
    assert session[3].blocks == session[4].blocks[:10]


def test_a_folder_of_sessions_shares_names_only_where_it_says_so(tmp_path):
    session = json.loads(AGENT.read_text())
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(session))
    first, second = read_trace(tmp_path, "agents").sessions
    assert not set(first[0].blocks) & set(second[0].blocks)
    for name in ("a", "b"):
        shared = json.dumps(session | {"hash_id_scope": "global"})
        (tmp_path / f"{name}.json").write_text(shared)
    first, second = read_trace(tmp_path, "agents").sessions
    assert first[0].blocks == second[0].blocks


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{broken"], "line 1 of"),
        ([json.dumps(LINE), "[1]"], "line 2 of"),
        ([json.dumps(LINE), "", json.dumps({"timestamp": 0})], "line 3 of"),
        ([json.dumps({**LINE, "hash_ids": ["x"]})], "found hash_ids=['x']"),
        ([json.dumps({**LINE, "input_length": -3})], "found input_length=-3"),
        ([json.dumps({**LINE, "hash_ids": [1, 2, 3]})], "found 3 hash_ids for 1000 tokens"),
        ([], "found no request"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_place(tmp_path, lines, said):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    ended = CliRunner().invoke(app, [str(path), "--trace-format", "mooncake"])
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["missing.jsonl"], [str(EXAMPLE), "--length-scale", "0"], ["missing.json"]]
)
def test_a_mistake_is_one_line(arguments):
    ended = CliRunner().invoke(app, arguments)
    assert (ended.exit_code, len(ended.stderr.splitlines())) == (2, 1)


def test_scaling_keeps_what_requests_have_in_common():
    trace = read_trace(EXAMPLE, "mooncake")
    small = trace.scaled(time=0.5, length=1 / 32)
    assert small.block_tokens == 16
    assert [r.blocks for r in small.requests] == [r.blocks for r in trace.requests]
    assert small.requests[-1].at_s == trace.requests[-1].at_s / 2
    shares = [
        best_reuse(t.requests, block_tokens=t.block_tokens, chunk_tokens=t.block_tokens)
        for t in (trace, small)
    ]
    assert shares[0]["reusable_share"] == pytest.approx(shares[1]["reusable_share"], rel=0.02)


def test_a_traces_part():
    trace = read_trace(AGENT, "agents")
    assert len(trace.first(3).requests) == 3
    assert max(r.input_tokens for r in trace.without_longer(1000).requests) == 900


def ids(request, *, key="0 s", alone="1", block_tokens=16):
    return prompt_tokens(request, block_tokens=block_tokens, key=key, alone=alone)


def test_equal_blocks_get_equal_tokens_at_the_same_places():
    first, second = ids(request(40, "a", "b", "c")), ids(request(50, "a", "b", "d", "e"))
    assert (len(first), len(second)) == (40, 50)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:40]
    assert ids(request(40, "a", "b", "c"), key="0 t")[:16] != first[:16]  # another run's salt
    assert all(FIRST_ID <= token < FIRST_ID + IDS for token in first)


def test_tokens_beyond_the_blocks_are_the_requests_own():
    first, second = (ids(request(40, "a"), alone=name) for name in "12")
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]


def test_what_could_be_reused_is_what_equal_tokens_say():
    """Against a plain cache of chunks that looks at the tokens themselves."""
    drawn = random.Random(3)
    requests = []
    for _ in range(60):
        names = [drawn.randrange(3) + 10 * depth for depth in range(drawn.randint(1, 6))]
        longest = 16 * len(names)
        requests.append(request(drawn.randint(longest - 15, longest + 20), *names))
    for chunk_tokens in (4, 16, 24, 40):
        stored, reused = set(), 0
        for number, each in enumerate(requests):
            tokens, hit, reusing = ids(each, alone=str(number)), 0, True
            for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
                reusing = reusing and tuple(tokens[:end]) in stored
                hit = end if reusing else hit
                stored.add(tuple(tokens[:end]))
            reused += min(hit, len(tokens) - 1)
        best = best_reuse(requests, block_tokens=16, chunk_tokens=chunk_tokens)
        assert best["reusable_tokens"] == reused
        assert best["distinct_tokens"] == len(stored) * chunk_tokens


class Clock:
    """Time that passes when somebody waits or answers."""

    def __init__(self):
        self.s = 0.0

    def now(self):
        return self.s

    def sleep_until(self, moment_s):
        self.s = max(self.s, moment_s)


def held(session, *, answers_s):
    clock, sent = Clock(), []

    def ask(turn, sending):
        sent.append((round(clock.s, 3), sending.late))
        clock.s += answers_s

    play(session, clock, ask)
    return sent


def test_arrivals_keep_their_times_and_sessions_their_gaps():
    arrivals = Trace(
        sessions=((request(9, at_s=5.0),), (request(9, at_s=7.5),)), block_tokens=16, timed=True
    )
    sessions = list(trace_sessions(arrivals, Options(), key=""))
    assert [s.first_send_s for s in sessions] == [0, 2.5]
    agent = (request(9, at_s=0.0), request(9, at_s=4.0), request(9, at_s=6.0))
    trace = Trace(sessions=(agent,), block_tokens=16, timed=False)
    (session,) = trace_sessions(trace, Options(), key="")
    assert held(session, answers_s=1.0) == [(0, False), (4, False), (6, False)]
    assert held(session, answers_s=3.0) == [(0, False), (4, False), (7, True)]


def replay(url, directory, *arguments):
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    options = ["--host", url, "--report-dir", str(directory), "--only-summary", "--tags", "trace"]
    return subprocess.run(
        [*command, *options, "--warm-up", "0", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.alone
def test_a_replay_sends_token_ids_and_says_what_was_reused(tmp_path):
    scaled = ["--time-scale=0.1", "--length-scale=0.0625", "--chunk-tokens=32"]
    with stub_server() as server:
        ended = replay(server.url, tmp_path / "out", "--trace", str(EXAMPLE), *scaled)
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said
        bodies = server.read("bodies")
    requests = read_trace(EXAMPLE, "auto").scaled(time=0.1, length=0.0625).requests
    assert [len(body["prompt"]) for body in bodies] == [r.input_tokens for r in requests]
    assert "At best " in said
    result = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert result["planned"] == result["best"]["requests"] == len(requests)
    assert result["reused"]["external_share"] > 0  # the stub says so, whatever was asked


@pytest.mark.alone
def test_a_bad_trace_ends_a_run_before_it_begins(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("{broken\n")
    ended = replay("http://127.0.0.1:9", tmp_path / "out", "--model=x", "--trace", str(path))
    assert ended.returncode == 2
    assert f"line 1 of {path}" in ended.stdout + ended.stderr
