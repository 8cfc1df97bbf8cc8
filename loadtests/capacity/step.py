"""One step of a sweep: so many users, measured, and whether they fit within the thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd

from loadtests.client import DROPPED, OK
from loadtests.figures import Measured
from loadtests.hits import hits_by_phase
from loadtests.slo import Slo

__all__ = ["FEWEST", "Limits", "Step", "delays_s", "measure"]

FEWEST = 20  # requests; of fewer than that a 95th percentile says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step has to keep.

    Args:
        ttft_s: the 95th percentile of the times to first token.
        itl_s: the mean time per token after an answer's first one.
        failure_rate: the share of requests that fail.
        client_lag_s: how late the client itself is, at 95 %; beyond, it measures itself.
    """

    ttft_s: float
    itl_s: float
    failure_rate: float = 0.01
    client_lag_s: float = 0.1

    @classmethod
    def of(cls, slo: Slo) -> Self:
        """Take [goodput], and the bounds of [[run]] on failures and on the client's lag."""
        bounds = {bound.figure: bound.max for bound in slo.run if bound.max is not None}
        return cls(
            ttft_s=slo.goodput.ttft_s,
            itl_s=slo.goodput.itl_s,
            failure_rate=bounds.get("failure_rate", 0.01),
            client_lag_s=bounds.get("client_lag_p95_s", 0.1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What so many users got, from the moment at which all of them were there.

    Args:
        users: at a time.
        offered_qps: requests per second by the plan.
        requests: that ended, or had waited longer than the limit when the step ended.
        ttft_mean_s: from when the plan had a request sent to its first token.
        ttft_p50_s: the same, median.
        ttft_p95_s: the same at 95 %; None for fewer than 20 requests.
        itl_mean_s: per token after an answer's first one.
        failure_rate: the share that failed.
        device_hit_rate: of all prompt tokens, by the server's counters.
        external_hit_rate: of the rest.
        client_lag_p95_s: how late the client was to its own timers.
        stopped_early: it was plain before the end that the step does not fit.
        misses: why it does not fit, for people; empty when it does.
    """

    users: int
    offered_qps: float
    requests: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_mean_s: float | None
    failure_rate: float | None
    device_hit_rate: float | None
    external_hit_rate: float | None
    client_lag_p95_s: float | None
    stopped_early: bool
    misses: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether all limits were kept."""
        return not self.misses

    def facts(self) -> dict[str, Any]:
        """Return the step as capacity.json has it."""
        return asdict(self) | {"fits": self.fits}


def delays_s(rows: pd.DataFrame, limit_s: float) -> pd.Series:
    """Return the time from when each request was to be sent, by the plan, to its first token.

    A server that falls behind delays the sends too, and the time from the send would hide that.
    A request that the step's end cut off before its first token counts with the time that it had
    waited if that is over the limit already; else nothing is known of it.
    """
    first = rows["started_s"] + pd.to_numeric(rows["ttft_s"]) - rows["intended_s"]
    waited = rows["ended_s"] - rows["intended_s"]
    cut_off = (rows["outcome"] == DROPPED) & first.isna() & (waited > limit_s)
    return first.where(~cut_off, waited).where((rows["outcome"] == OK) | cut_off).dropna()


def measure(run: Measured, limits: Limits, *, stopped_early: bool) -> Step:
    """Judge the rows of a step."""
    rows = run.rows[run.rows["started_s"] >= run.meta["steady_from_s"]]
    delays = delays_s(rows, limits.ttft_s)
    answered = rows[rows["outcome"] == OK]
    later = pd.to_numeric(answered["completion_tokens"]) - 1
    tokens_s = (pd.to_numeric(answered["tpot_s"]) * later).sum()
    ended = rows[rows["outcome"] != DROPPED]
    phases = hits_by_phase(run.metrics, run.meta["steady_from_s"])
    hits = phases.get("steady", phases.get("whole run"))
    figures: dict[str, Any] = {
        "requests": len(delays),
        "ttft_mean_s": float(delays.mean()) if len(delays) else None,
        "ttft_p50_s": float(delays.median()) if len(delays) else None,
        "ttft_p95_s": float(np.percentile(delays, 95)) if len(delays) >= FEWEST else None,
        "itl_mean_s": float(tokens_s / later.sum()) if later.sum() else None,
        "failure_rate": float((ended["outcome"] != OK).mean()) if len(ended) else None,
        "client_lag_p95_s": float(run.client["lag_s"].quantile(0.95)) if len(run.client) else None,
    }
    return Step(
        users=run.meta["users"],
        offered_qps=run.meta["offered_qps"],
        device_hit_rate=hits.device_rate if hits else None,
        external_hit_rate=hits.external_rate if hits else None,
        stopped_early=stopped_early,
        misses=_misses(figures, limits, stopped_early=stopped_early),
        **figures,
    )


def _misses(figures: Mapping[str, Any], limits: Limits, *, stopped_early: bool) -> list[str]:
    p95_s, itl_s, failures, lag_s = (
        figures[name] for name in ("ttft_p95_s", "itl_mean_s", "failure_rate", "client_lag_p95_s")
    )
    misses = []
    if stopped_early:
        misses.append(f"more than a tenth of the planned requests took over {limits.ttft_s:g} s")
    elif p95_s is None:
        misses.append(f"{figures['requests']} requests, of at least {FEWEST}")
    if p95_s is not None and p95_s > limits.ttft_s:
        misses.append(f"TTFT p95 {p95_s:.2f} s, of at most {limits.ttft_s:g} s")
    if itl_s is not None and itl_s > limits.itl_s:
        misses.append(f"ITL mean {itl_s * 1e3:.0f} ms, of at most {limits.itl_s * 1e3:g} ms")
    if failures is None:
        misses.append("nothing was measured: no request ended")
    elif failures > limits.failure_rate:
        misses.append(f"{failures:.0%} failed, of at most {limits.failure_rate:.0%}")
    if lag_s is not None and lag_s > limits.client_lag_s:
        misses.append(f"the client was {lag_s:.2f} s late: it is the bottleneck")
    return misses
