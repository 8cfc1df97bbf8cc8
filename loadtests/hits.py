"""Hit rates, computed from the server's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

__all__ = ["COUNTERS", "Hits", "hits_by_phase", "hits_over_time"]

COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
)


@dataclass(frozen=True, slots=True)
class Hits:
    """The tokens that were looked up in a span of time, and those that a cache had.

    The engine looks into its own cache first, for all of a prompt; only the rest of it is looked
    up in the external cache (LMCache). So the two rates have different denominators.

    Args:
        device_queries: prompt tokens looked up in the engine's own cache: all of them.
        device_hits: those that it had.
        external_queries: the others, looked up in LMCache.
        external_hits: those that LMCache had, in whatever tier.
    """

    device_queries: float = 0.0
    device_hits: float = 0.0
    external_queries: float = 0.0
    external_hits: float = 0.0

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.device_queries + other.device_queries,
            self.device_hits + other.device_hits,
            self.external_queries + other.external_queries,
            self.external_hits + other.external_hits,
        )

    @property
    def device_rate(self) -> float | None:
        """The share of all prompt tokens that was in the engine's own cache."""
        return _ratio(self.device_hits, self.device_queries)

    @property
    def external_rate(self) -> float | None:
        """The share that LMCache had of the tokens that the engine's own cache did not have."""
        return _ratio(self.external_hits, self.external_queries)

    @property
    def computed_rate(self) -> float | None:
        """The share of all prompt tokens that no cache had."""
        cached = _ratio(self.device_hits + self.external_hits, self.device_queries)
        return None if cached is None else 1 - cached

    def figures(self) -> dict[str, Any]:
        """Return the counts and rates as summary.json has them."""
        return {
            "device_hits": self.device_hits,
            "device_queries": self.device_queries,
            "device_rate": self.device_rate,
            "external_hits": self.external_hits,
            "external_queries": self.external_queries,
            "external_rate": self.external_rate,
            "computed_rate": self.computed_rate,
        }


def hits_by_phase(metrics: pd.DataFrame, steady_from_s: float) -> dict[str, Hits]:
    """Return the hits of the whole run, and of its parts where it has some."""
    counts = _counters(metrics)
    if len(counts) < 2:
        return {}
    # What was counted before the run began is not the run's.
    before = counts[counts["at_s"] <= 0]
    begin_s = before["at_s"].iloc[-1] if len(before) else counts["at_s"].iloc[0]
    end_s = counts["at_s"].iloc[-1]
    phases = {"whole run": _between(counts, begin_s, end_s)}
    if begin_s < steady_from_s < end_s:
        phases["ramp-up"] = _between(counts, begin_s, steady_from_s)
        phases["steady"] = _between(counts, steady_from_s, end_s)
    return phases


def hits_over_time(metrics: pd.DataFrame, window_s: float) -> pd.DataFrame:
    """Return columns at_s, device and external: shares of all prompt tokens, in windows."""
    counts = _counters(metrics)
    rows = []
    for at_s in counts["at_s"][counts["at_s"] >= window_s]:
        hits = _between(counts, at_s - window_s, at_s)
        if hits.device_queries > 0:
            rows.append(
                {
                    "at_s": at_s,
                    "device": hits.device_hits / hits.device_queries,
                    "external": hits.external_hits / hits.device_queries,
                }
            )
    return pd.DataFrame(rows, columns=["at_s", "device", "external"])


def _counters(metrics: pd.DataFrame) -> pd.DataFrame:
    if not {*COUNTERS[:2]} <= set(metrics.columns):
        return pd.DataFrame({"at_s": []})
    # An engine without a connector may not have the external ones.
    return metrics.reindex(columns=["at_s", *COUNTERS]).dropna(subset=list(COUNTERS[:2])).fillna(0)


def _between(counts: pd.DataFrame, begin_s: float, end_s: float) -> Hits:
    """Return the counts between the last samples before two moments."""
    at = [counts[counts["at_s"] <= moment_s].tail(1) for moment_s in (begin_s, end_s)]
    first = at[0] if len(at[0]) else counts.head(1)
    return Hits(*(float(at[1][name].iloc[0] - first[name].iloc[0]) for name in COUNTERS))


def _ratio(part: float, total: float) -> float | None:
    return part / total if total > 0 else None
