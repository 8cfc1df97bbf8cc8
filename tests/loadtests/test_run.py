"""Whole runs of Locust against the stub server."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from urllib.parse import urlencode

import pytest
from locust_process import end, locust
from stub_process import stub_server

from lmcache_xpu.harness.engine_process import free_port

pytestmark = pytest.mark.alone


def rows_of(directory):
    return [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]


def read(directory, name):
    return json.loads((directory / name).read_text())


def wait_for(condition, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_leaves_rows_figures_pictures_and_a_page(stub, tmp_path):
    directory = tmp_path / "report"
    with locust(stub.url, directory, **{"--duration-s": 6}) as process:
        code, said = end(process)
    assert code == 0, said
    rows, meta, summary = (
        rows_of(directory),
        read(directory, "meta.json"),
        read(directory, "summary.json"),
    )
    assert meta["ended_by"] == "time"
    assert {row["outcome"] for row in rows} <= {"ok", "dropped"}
    # 4 users, 4 rounds, 4 per second: 16 / 3 per second, after a gap of 1 s; by number, not by
    # rate, since both ends of 3 s count.
    steady = [row for row in rows if 1.0 <= row["started_s"] < 4.0]
    assert len(steady) == pytest.approx(16, abs=2)
    assert all(row["started_s"] - row["due_s"] < 0.1 for row in rows)
    variant = summary["variants"]["server"]
    assert variant["offered_qps"] == pytest.approx(16 / 3)
    assert variant["ttft_s"]["p50"] == pytest.approx(0.05, abs=0.02)
    assert variant["tpot_s"]["p50"] == pytest.approx(0.01, abs=0.005)
    assert variant["device_hit_rate"] == pytest.approx(1 / 4, abs=0.01)
    assert variant["external_hit_rate"] == pytest.approx(2 / 3, abs=0.01)
    page = (directory / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(directory.glob("*.png"))) - 1 == 4
    assert (directory / "summary.png").exists()  # all of it in one image
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    # Last, alone and bare: Locust's tables are above it.
    assert said.splitlines()[-2:] == ["", f"YES: {summary['answers'][0]['why']}"]


def test_conversations_grow_and_a_salt_is_in_front(stub, tmp_path):
    with locust(stub.url, tmp_path / "r", "--canned", **{"--salt": "pepper"}) as process:
        code, said = end(process)
    assert code == 0, said
    bodies = {body["id"]: body for body in stub.read("bodies") if body["id"]}
    first, second = (bodies[f"pepper-5-{question}"]["messages"] for question in (1, 2))
    assert first[0]["content"].startswith("Hi, here's some system prompt: pepper hi hi")
    assert second[0] == first[0]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"].split() == ["5.1", *["a"] * 7]


def test_the_rows_of_all_workers_arrive(stub, tmp_path):
    directory = tmp_path / "report"
    with locust(stub.url, directory, "--processes", "2", **{"--warm-up": 0}) as process:
        code, said = end(process)
    assert code == 0, said
    rows = rows_of(directory)
    assert {row["worker"] for row in rows} == {0, 1}
    asked = [(row["user_id"], row["question"]) for row in rows]
    assert len(set(asked)) == len(asked)
    assert len([r for r in rows if 1.0 <= r["started_s"] < 4.0]) == pytest.approx(16, abs=3)
    # Every request that the server saw has its row, those of the last second as well. On a busy
    # machine the end of the run cuts one off before it is sent.
    seen = {tuple(map(int, key.rsplit("-", 2)[1:])) for key in stub.read("log") if key}
    assert seen <= set(asked)
    unseen = [row for row in rows if (row["user_id"], row["question"]) not in seen]
    assert {row["outcome"] for row in unseen} <= {"dropped"}


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGTERM, ("--processes", "2"))],
)
def test_an_interrupted_run_is_reported(stub, tmp_path, number, processes):
    directory = tmp_path / "report"
    with locust(stub.url, directory, *processes, **{"--duration-s": 60}) as process:
        rows = directory / "rows.jsonl"
        wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 5)
        process.send_signal(number)
        code, said = end(process, within_s=20)
    assert code == 1, said
    assert read(directory, "meta.json")["ended_by"] == "interrupted"
    assert "cut short (interrupted)" in (directory / "report.html").read_text()
    assert "thresholds hold" not in said


def test_a_server_that_goes_away_ends_the_run_with_a_report(tmp_path):
    directory = tmp_path / "report"
    with (
        stub_server() as stub,
        locust(stub.url, directory, **{"--duration-s": 60, "--gone-s": 2}) as process,
    ):
        rows = directory / "rows.jsonl"
        wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 5)
        stub.process.kill()
        code, said = end(process, within_s=20)
    assert code == 1, said
    assert read(directory, "meta.json")["ended_by"] == "server gone"
    failures = read(directory, "summary.json")["variants"]["server"]["failures"]
    assert failures.keys() <= {"broken off", "not connected"}
    assert failures["not connected"] > 0


def test_requests_that_stall_are_counted_and_sessions_go_on(stub, tmp_path):
    directory = tmp_path / "report"
    options = {"--model": "stub-stall", "--warm-up": 0, "--silence-s": 0.3, "--duration-s": 5}
    with locust(stub.url, directory, **options) as process:
        code, said = end(process)
    assert code == 1, said
    rows = rows_of(directory)
    assert {row["outcome"] for row in rows} <= {"stalled", "dropped"}
    assert max(row["question"] for row in rows if row["user_id"] > 4) > 1
    assert "share of requests that failed is 100.0%, expected at most 1.0%" in said


def test_a_report_that_can_not_be_written_loses_no_row(stub, tmp_path):
    directory, slo = tmp_path / "report", tmp_path / "slo.toml"
    slo.write_text("[goodput]\nttft_s=1\nitl_s=1\n")
    with locust(stub.url, directory, **{"--slo": slo}) as process:
        wait_for(lambda: (directory / "rows.jsonl").exists())
        slo.write_text("no TOML")
        code, said = end(process)
    assert code == 1, said
    assert "the report can't be written" in said
    assert f"--again {directory}" in said
    assert "Traceback" not in said
    assert len(rows_of(directory)) > 5
    assert read(directory, "meta.json")["ended_by"] == "time"


def test_a_file_of_conversations_is_held_to_its_end(stub, tmp_path):
    talk = [
        {"from": "human", "value": "one two"},
        {"from": "gpt", "value": "three", "num_tokens": 3},
        {"from": "human", "value": "four"},
        {"from": "gpt", "value": "five six"},
    ]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": talk}, {"conversations": []}] * 6))
    options = {"--tags": "conversations", "--conversations": file, "--qps": 0, "--duration-s": 30}
    with locust(stub.url, tmp_path / "r", "--canned", **options) as process:
        code, said = end(process, within_s=20)
    assert code == 0, said
    assert read(tmp_path / "r", "meta.json")["ended_by"] == "all sessions held"
    rows = rows_of(tmp_path / "r")
    assert sorted((r["user_id"], r["round"]) for r in rows) == [
        (user, k) for user in range(1, 7) for k in (1, 2)
    ]
    assert {row["completion_tokens"] for row in rows} == {3}


def test_stages_change_the_number_of_users(stub, tmp_path):
    directory = tmp_path / "report"
    options = {"--tags": "agents", "--qps": 0, "--stages": "3:2,9:6", "--duration-s": 6}
    with locust(stub.url, directory, **options) as process:
        code, said = end(process)
    assert code == 0, said
    rows = rows_of(directory)
    at_a_time = [
        sum(row["started_s"] <= at_s < row["ended_s"] for row in rows) for at_s in (2.0, 5.5)
    ]
    assert at_a_time == pytest.approx([2, 6], abs=1)


def test_the_web_page_starts_and_stops_runs(stub, tmp_path):
    port, directory = free_port(), tmp_path / "report"
    page = f"http://127.0.0.1:{port}"
    more = ("--web-host", "127.0.0.1", "--web-port", str(port))
    with locust(stub.url, directory, *more, headless=False, **{"--duration-s": 60}) as process:

        def answers():
            try:
                return urllib.request.urlopen(page, timeout=5).status == 200
            except OSError:
                return False

        wait_for(answers)
        form = urlencode({"user_count": 4, "spawn_rate": 1, "host": stub.url, "qps": 8}).encode()
        with urllib.request.urlopen(f"{page}/swarm", form, timeout=20) as response:
            assert json.load(response)["success"]
        wait_for(lambda: (directory / "rows.jsonl").exists() and len(rows_of(directory)) > 10)
        urllib.request.urlopen(f"{page}/stop", b"", timeout=20).close()
        wait_for(lambda: (directory / "report.html").exists())
        process.terminate()
        end(process, within_s=20)
    assert read(directory, "meta.json")["options"]["qps"] == 8
