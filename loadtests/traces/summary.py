"""What was reused of a trace, beside what could have been."""

from __future__ import annotations

import json
from pathlib import Path

from loadtests.client import OK
from loadtests.doubts import doubt_of
from loadtests.figures import load
from loadtests.hits import hits_by_phase
from loadtests.options import Options
from loadtests.traces.reuse import Reuse, best_reuse
from loadtests.traces.sessions import planned

__all__ = ["RESULT", "described", "summarise"]

RESULT = "trace.json"


def described(best: Reuse) -> str:
    """Say what a trace is and what could be reused of it."""
    return (
        f"{best['requests']:,} requests, {best['prompt_tokens']:,} prompt tokens, "
        f"{best['distinct_tokens']:,} of them distinct. At best {best['reusable_share']:.1%} can "
        f"be reused (chunks of {best['chunk_tokens']})."
    )


def summarise(directory: Path, options: Options) -> str:
    """Write trace.json beside a run's rows; what it says, in two sentences.

    The best is of the requests that were answered, in the order in which they were sent.
    """
    run = load(directory)
    trace = planned(options)
    answered = run.rows[run.rows["outcome"] == OK].sort_values("started_s")
    sent = [
        trace.sessions[user - options.init_user_id - 1][question - 1]
        for user, question in zip(answered["user_id"], answered["question"], strict=True)
    ]
    best = best_reuse(sent, block_tokens=trace.block_tokens, chunk_tokens=options.chunk_tokens)
    hits = hits_by_phase(run.metrics, 0.0).get("whole run")
    tokens = hits.device_queries if hits else 0.0
    result = {"planned": len(trace.requests), "best": best, "reused": None}
    said = f"Trace: {described(best)}"
    if doubt := doubt_of([run]):
        said += f" NOT KNOWN what was reused: {doubt}"
    elif hits is not None and tokens > 0:
        device, external = hits.device_hits / tokens, hits.external_hits / tokens
        total = device + external
        share = best["reusable_share"]
        result["reused"] = {
            "prompt_tokens": tokens,
            "device_share": device,
            "external_share": external,
            "of_the_best": total / share if share else None,
        }
        said += (
            f" Reused: {total:.1%} (the engine's own cache {device:.1%}, LMCache {external:.1%})"
        )
        said += f", {total / share:.0%} of the best." if share else "."
    else:
        said += " The server's metrics don't say what was reused."
    (directory / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    return said
