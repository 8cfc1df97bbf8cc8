"""Why a run's figures say nothing: the one judgement that every report begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from loadtests.client import DROPPED, OK
from loadtests.hits import COUNTERS, hits_by_phase
from loadtests.scrape import STARTED
from loadtests.words import of_tokens

if TYPE_CHECKING:
    from loadtests.figures import Measured

__all__ = ["FAILED_SHARE", "doubt_of", "doubt_of_counters"]

FAILED_SHARE = 0.05  # of requests: beyond, the times are those of the requests that were left
FOREIGN = 1.5  # times the prompt tokens of this client: beyond, the server had other clients


def doubt_of(runs: Sequence[Measured]) -> str | None:
    """Return why nothing can be said of these runs, in a sentence; None where something can."""
    for run in runs:
        ended = run.rows[run.rows["outcome"] != DROPPED]
        failed = int((ended["outcome"] != OK).sum())
        if failed == len(ended):
            return f"nothing was measured: none of {len(ended)} requests was answered."
        if failed > FAILED_SHARE * len(ended):
            return (
                f"{failed} of {len(ended)} requests failed ({failed / len(ended):.0%}); the others "
                "had the server for themselves."
            )
        if doubt := doubt_of_counters(run):
            return doubt
    return None


def doubt_of_counters(run: Measured) -> str | None:
    """Return why the server's counters do not say what this run did; None where they do."""
    begin = run.metrics["at_s"][run.metrics["at_s"] <= 0].max()
    metrics = run.metrics if pd.isna(begin) else run.metrics[run.metrics["at_s"] >= begin]
    counters = metrics.reindex(columns=[*COUNTERS, STARTED]).apply(pd.to_numeric)
    backwards = any((counters[name].dropna().diff() < 0).any() for name in COUNTERS)
    if backwards or counters[STARTED].nunique() > 1:
        return (
            "the engine was started anew during the run: its counters began again, and its cache "
            "was empty. Measure again."
        )
    hits = hits_by_phase(run.metrics, 0.0).get("whole run")
    if hits is None:
        return None
    cached = hits.device_hits + hits.external_hits
    sent = _sent_tokens(run.rows)
    if cached > hits.device_queries or hits.external_hits > hits.external_queries:
        said = f"its caches had {of_tokens(cached, hits.device_queries)}"
    elif sent and hits.device_queries > FOREIGN * sent:
        said = f"it counted {hits.device_queries:,.0f} prompt tokens, of {sent:,.0f} sent"
    else:
        return None
    return (
        f"the server's counters are not those of this load alone: {said}. Other clients used it; "
        "measure while nobody else does."
    )


def _sent_tokens(rows: pd.DataFrame) -> float:
    """Return the prompt tokens that were sent at the most; 0 where the server does not say.

    A request without a whole answer has no number, and counts as the longest of the others.
    """
    rows = rows.reindex(columns=["outcome", "prompt_tokens"])
    tokens = pd.to_numeric(rows["prompt_tokens"])
    if tokens[rows["outcome"] == OK].isna().any():
        return 0.0
    return float(tokens.fillna(tokens.max()).sum())
