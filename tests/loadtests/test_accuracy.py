"""The whole client under load, against a server that says what it really did.

200 streams at a time of 100 tokens per second each, where the cores are fast enough, from one
process with one thread. The stub's own lateness is not the client's, so times are compared with
what the stub noted. Both need a core to themselves; a measurement that something disturbed says
nothing about the client. Not all that disturbs can be seen from here (a virtual machine's host,
which gives its cores less now and then, say), and a slow host's cores are full with 100 streams.
So a bad one is made again, at last with fewer streams: a client that is late by itself is late
every time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from stub_process import stub_server

TOKENS, FIRST_S, TOKEN_S = 100, 0.050, 0.010
RUN_S = 8
WITHIN_S = 0.002
# Memory, KiB per answer. To keep each answer's text costs 1.8, its gaps 3.6, the whole reply 5 to 8
# (measured by keeping them, November 2026); a run that keeps none has 0.1 to 0.3, once 1.6 on a
# busy host. What is kept of each answer is seen in every attempt, so the least counts.
GROWTH_KIB = 0.9
# Streams. The slowest host so far: p95 14 to 22 ms with 200, 2.2 to 9 with 100, no core waiting.
ATTEMPTS = [200] * 3 + [100] * 3 + [50] * 3
# Of a core, that other processes may take meanwhile; and of the time, that ours may wait for one.
OTHERS, WAITING = 0.25, 0.03
ROOT = Path(__file__).parents[2]


class Machine:
    """What else the cores did while two processes ran."""

    def __init__(self, *pids):
        self.processes = [psutil.Process(pid) for pid in pids]
        self.begin, self.busy = time.monotonic(), self._busy()
        self.own = self.waited = 0.0
        for pid in pids:  # before others, where that is allowed
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))

    def look(self):
        """While both run: their shares so far."""
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            times = [process.cpu_times() for process in self.processes]
            self.own = sum(t.user + t.system for t in times)
            waits = [Path(f"/proc/{p.pid}/schedstat").read_text() for p in self.processes]
            self.waited = max(int(wait.split()[1]) / 1e9 for wait in waits)
            self.others = self._busy() - self.busy - self.own
            self.length = time.monotonic() - self.begin

    def disturbed(self):
        """Why the measurement says nothing; empty when it does."""
        others, waiting = self.others / self.length, self.waited / self.length
        if others > OTHERS or waiting > WAITING:
            return f"others took {others:.2f} cores; client or stub waited {waiting:.1%} of it"
        return ""

    def _busy(self):
        times = psutil.cpu_times()
        return sum(times) - times.idle - times.iowait


def measure(directory, streams):
    """Rows of a run, the stub's log, the client's own samples, and what disturbed it."""
    options = {
        "--users": streams,
        "--tags": "no-reuse",
        "--qps": streams / (FIRST_S + TOKENS * TOKEN_S),
        "--duration-s": RUN_S,
        "--answer-len": TOKENS,
        "--shared-system-prompt": 10,
        "--user-history-prompt": 10,
        "--salt": "s",
        "--report-dir": directory,
    }
    with stub_server() as stub:
        command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
        command += ["--only-summary", "--enforce-strict-concurrent-users", "--host", stub.url]
        command += [str(word) for pair in options.items() for word in pair]
        said = directory.parent / "locust.log"
        with said.open("w") as log:
            client = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        machine = Machine(client.pid, stub.process.pid)
        while client.poll() is None:
            machine.look()
            time.sleep(0.2)
        log = stub.read("log")
    assert client.returncode in (0, 1), said.read_text()
    rows, own = (
        [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for name in ("rows.jsonl", "client.jsonl")
    )
    return rows, log, own, machine.disturbed()


def errors_s(rows, log, streams):
    """By how much times differ from what the stub did, each at 50, 95, 99 and 100 %.

    TTFT without the first request of each user: it has the making of a connection in it, of which
    the stub knows nothing.
    """
    ttft, gaps = [], []
    for row in rows:
        came_s, *sent_s = log[f"s-{row['user_id']}-1"]
        if row["user_id"] > streams:
            ttft.append(row["ttft_s"] - (sent_s[0] - came_s))
        gaps.append(np.array(row["gaps_s"]) - np.diff(sent_s))
    errors = {
        "TTFT": ttft,
        "gap": np.concatenate(gaps),
        "mean gap of an answer": [gap.mean() for gap in gaps],
    }
    return {k: np.percentile(np.abs(v), [50, 95, 99, 100]) for k, v in errors.items()}


@pytest.mark.alone
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="client and stub need a core each")
def test_times_are_right_within_two_milliseconds(tmp_path):
    late, disturbances, growths_kib = {}, [], []
    for attempt, streams in enumerate(ATTEMPTS):
        directory = tmp_path / str(attempt) / "report"
        directory.parent.mkdir()
        rows, log, own, disturbed = measure(directory, streams)
        done = [row for row in rows if row["outcome"] == "ok"]
        found_ms = {k: (v * 1e3).round(2).tolist() for k, v in errors_s(done, log, streams).items()}
        print(streams, "streams; ms at 50, 95, 99 and 100 %:", found_ms, disturbed)
        # What a busy machine does not excuse.
        assert {row["outcome"] for row in rows} <= {"ok", "dropped"}
        assert all(len(row["gaps_s"]) == TOKENS - 1 for row in done)
        memory_mib = [sample["memory_mib"] for sample in own if sample["at_s"] > 2]
        answers = sum(row["ended_s"] > 2 for row in done)
        growths_kib.append((memory_mib[-1] - memory_mib[0]) * 1024 / answers)
        late = {name: error for name, error in found_ms.items() if error[1] >= WITHIN_S * 1e3}
        disturbances.append(disturbed)
        if not late and min(growths_kib) < GROWTH_KIB:
            break
    assert min(growths_kib) < GROWTH_KIB, "the client keeps something of each answer in memory"
    if late and all(disturbances):
        pytest.skip(f"the machine, {len(ATTEMPTS)} times; last: {disturbed}")
    assert late == {}, f"ms at 50, 95, 99 and 100 %, {len(ATTEMPTS)} times, last of them"
    at_a_time = [
        sum(row["started_s"] <= at_s < row["ended_s"] for row in rows)
        for at_s in np.linspace(2, RUN_S - 2, 20)
    ]
    assert np.median(at_a_time) > 0.9 * streams
    assert np.median([r["ttft_s"] for r in done]) == pytest.approx(FIRST_S, abs=WITHIN_S)
    every_gap_s = [gap for row in done for gap in row["gaps_s"]]
    assert np.median(every_gap_s) == pytest.approx(TOKEN_S, abs=WITHIN_S)
