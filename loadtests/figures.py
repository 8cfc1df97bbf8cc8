"""The figures of runs, computed from the rows that these left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from loadtests.client import DROPPED, OK
from loadtests.doubts import doubt_of
from loadtests.hits import Hits, hits_by_phase
from loadtests.recorder import CLIENT, META, REQUESTS
from loadtests.scrape import ENGINE_TOKENS, METRICS
from loadtests.slo import Goodput

__all__ = ["FEWEST", "PERCENTILES", "Measured", "figures", "load", "percentiles"]

PERCENTILES = (50, 90, 95, 99)
FEWEST = 20  # values that a percentile is given of
MOSTLY = 0.5  # of a prompt: so much from caches makes a request one that hit

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run as it was read.

    Args:
        meta: the run's description.
        rows: one for each request.
        client: the client's own samples.
        metrics: the server's samples.
    """

    meta: dict[str, Any]
    rows: pd.DataFrame
    client: pd.DataFrame
    metrics: pd.DataFrame

    @property
    def answered(self) -> pd.DataFrame:
        """Requests that were answered whole."""
        return self.rows[self.rows["outcome"] == OK]

    @property
    def steady(self) -> pd.DataFrame:
        """The rows of requests that were sent once every early user had sent one."""
        return self.rows[self.rows["started_s"] >= self.meta["steady_from_s"]]


ROW_COLUMNS = (
    *("worker", "user_id", "question", "round", "intended_s", "due_s", "late", "started_s"),
    *("ended_s", "outcome", "detail", "ttft_s", "tpot_s", "e2e_s", "gaps_s"),
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
)


def load(directory: Path) -> Measured:
    """Read the files of a run, also of one that was cut short."""
    return Measured(
        meta=json.loads((directory / META).read_text()),
        rows=_lines(directory / REQUESTS, ROW_COLUMNS),
        client=_lines(directory / CLIENT, ("at_s", "lag_s", "cpu_percent", "memory_mib")),
        metrics=_lines(directory / METRICS, ("at_s",)).sort_values("at_s"),
    )


def _lines(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    lines = path.read_text().splitlines() if path.exists() else []
    table = pd.DataFrame([json.loads(line) for line in lines])
    return table.reindex(columns=[*columns, *(c for c in table.columns if c not in columns)])


def percentiles(values: Any) -> dict[str, float | None]:
    """Return number, mean and exact percentiles of the values that are there.

    Of fewer values than FEWEST a percentile would be one request's, or between two: it is None.
    """
    numbers = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce").dropna()
    enough = len(numbers) >= FEWEST
    return {
        "n": len(numbers),
        "mean": None if numbers.empty else float(numbers.mean()),
        **{f"p{p}": float(np.percentile(numbers, p)) if enough else None for p in PERCENTILES},
    }


def figures(runs: Sequence[Measured], goodput: Goodput) -> Figures:
    """Return the figures of runs of the same workload on the same variant, pooled."""
    rows = pd.concat([run.rows for run in runs], ignore_index=True)
    steady = pd.concat([run.steady for run in runs], ignore_index=True)
    answered = steady[steady["outcome"] == OK]
    ended = rows[rows["outcome"] != DROPPED]
    failures = ended[ended["outcome"] != OK]["outcome"].value_counts()
    steady_s = sum(run.meta["lasted_s"] - run.meta["steady_from_s"] for run in runs)
    steady_s = max(steady_s, 0.001)
    all_answered = rows[rows["outcome"] == OK]
    gaps = np.concatenate([np.asarray(g) for g in answered["gaps_s"]] or [np.array([])])
    good = answered[
        (answered["ttft_s"] <= goodput.ttft_s)
        & (pd.to_numeric(answered["tpot_s"]).fillna(0.0) <= goodput.itl_s)
    ]
    lag = pd.concat([run.client for run in runs])
    pooled: Figures = {
        "runs": len(runs),
        "doubt": doubt_of(runs),
        "requests": len(ended),
        "dropped": int((rows["outcome"] == DROPPED).sum()),
        "failures": {str(kind): int(count) for kind, count in failures.items()},
        "failure_rate": float(failures.sum() / len(ended)) if len(ended) else None,
        "late_sends": int(rows["late"].sum()),
        "offered_qps": runs[0].meta["offered_qps"],
        "achieved_qps": len(steady) / steady_s,
        "answered_qps": len(answered) / steady_s,
        "prompt_tokens_per_s": _total(answered, "prompt_tokens") / steady_s,
        "answer_tokens_per_s": _total(answered, "completion_tokens") / steady_s,
        "goodput_share": len(good) / len(answered) if len(answered) else None,
        "goodput_qps": len(good) / steady_s,
        "ttft_s": percentiles(answered["ttft_s"]),
        "ttft_later_rounds_s": percentiles(_round(answered, later=True)["ttft_s"]),
        "ttft_first_round_s": percentiles(_round(all_answered, later=False)["ttft_s"]),
        "ttft_hit_s": percentiles(_hit(all_answered, hit=True)["ttft_s"]),
        "ttft_missed_s": percentiles(_hit(all_answered, hit=False)["ttft_s"]),
        "intended_to_first_token_s": percentiles(
            answered["started_s"] + answered["ttft_s"] - answered["intended_s"]
        ),
        "chunk_gap_s": percentiles(gaps),
        "tpot_s": percentiles(answered["tpot_s"]),
        "e2e_s": percentiles(answered["e2e_s"]),
        "ttft_by_round_s": {
            int(number): percentiles(group["ttft_s"])
            for number, group in all_answered.groupby("round")
        },
        "client_lag_p95_s": float(lag["lag_s"].quantile(0.95)) if len(lag) else None,
        "client_lag_max_s": float(lag["lag_s"].max()) if len(lag) else None,
        "client_cpu_percent": float(lag["cpu_percent"].quantile(0.95)) if len(lag) else None,
        "client_memory_mib": float(lag["memory_mib"].max()) if len(lag) else None,
        "ended_by": sorted({run.meta["ended_by"] for run in runs}),
    }
    return pooled | _server(runs)


def _round(rows: pd.DataFrame, *, later: bool) -> pd.DataFrame:
    return rows[rows["round"] > 1] if later else rows[rows["round"] == 1]


def _hit(rows: pd.DataFrame, *, hit: bool) -> pd.DataFrame:
    """Return requests most of whose prompt some cache had, or the others; by the server's word."""
    cached, prompt = (
        pd.to_numeric(rows[column], errors="coerce")
        for column in ("cached_tokens", "prompt_tokens")
    )
    share = cached / prompt
    return rows[share >= MOSTLY] if hit else rows[share < MOSTLY]


def _total(rows: pd.DataFrame, column: str) -> float:
    return float(pd.to_numeric(rows[column], errors="coerce").fillna(0).sum())


def _server(runs: Sequence[Measured]) -> Figures:
    """Return the figures in the server's metrics; nothing for a server without them."""
    phases: dict[str, Hits] = {}
    for run in runs:
        for phase, hits in hits_by_phase(run.metrics, run.meta["steady_from_s"]).items():
            phases[phase] = phases[phase] + hits if phase in phases else hits
    if not phases:
        return {}
    samples = pd.concat([run.metrics for run in runs])
    tiers = [c for c in samples.columns if "usage" in c or "_used_" in c or c.startswith("hw_")]
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    main = phases.get("steady", phases["whole run"])
    return {
        "hit_rates": {phase: hits.figures() for phase, hits in phases.items()},
        "device_hit_rate": main.device_rate,
        "external_hit_rate": main.external_rate,
        "found_rate": None if main.computed_rate is None else 1 - main.computed_rate,
        "most": {name: float(samples[name].max()) for name in (*tiers, *gauges) if name in samples},
        "engine_cache_tokens": (
            float(samples[ENGINE_TOKENS].max()) if ENGINE_TOKENS in samples else None
        ),
    }
