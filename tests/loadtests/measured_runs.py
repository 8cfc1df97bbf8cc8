"""Runs of the load test whose answers are known: rows, counters, thresholds and arms."""

from __future__ import annotations

import json

import numpy as np

from loadtests.comparison import Arm
from loadtests.figures import load
from loadtests.hits import COUNTERS

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
        "prompt_tokens": 200 if ok else None,
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


COUNTED = [  # at_s, then the four counters, which began before the run
    (-0.5, 1000, 500, 500, 100),
    (2.0, 1400, 600, 800, 100),
    (5.0, 2000, 700, 1300, 300),
    (10.0, 4000, 1200, 2800, 1500),
    (15.0, 6000, 1700, 4300, 2700),
]

# Counters of a run in which all was found in the engine's own cache, and of one without a tier.
FITS = [(0.0, 0, 0, 0, 0), (15.0, 6000, 5000, 1000, 0)]
NOT_ASKED = [(0.0, 0, 0, 0, 0), (15.0, 6000, 5000, 0, 0)]
NEW = [(0.0, 0, 0, 0, 0), (15.0, 6000, 0, 6000, 0)]


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
        measured = run(tmp_path / name, rows(later_s, first_s), counters=COUNTED, ended_by=ended_by)
        return Arm(name, about, [measured], [run(tmp_path / f"{name}-c", control(whole_s))])

    return [
        made("none", "vLLM without offload", base_s, base_s, 1.0),
        made("cpu", "CPU tier", cpu_s, base_s, 1.03),
        made("disk", "disk tier after a restart", cpu_s, disk_first_s, 1.0),
    ]
