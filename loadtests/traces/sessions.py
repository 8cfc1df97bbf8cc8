"""A trace as sessions of the load test."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

from loadtests.options import Options
from loadtests.session import Session, Turn
from loadtests.traces.formats import has_arrivals, read_trace
from loadtests.traces.tokens import prompt_tokens
from loadtests.traces.trace import Request, Trace

__all__ = ["offered_qps", "planned", "trace_sessions", "trace_users"]

IN_FLIGHT = 256  # users for a trace of arrivals: each holds one request, or waits for its time


def planned(options: Options) -> Trace:
    """Read the trace that a run is about, as it is to be sent.

    Raises:
        ValueError: no file, it can't be read, or nothing of it is left.
    """
    if options.trace is None:
        raise ValueError("found no trace; expected --trace FILE.")
    return _planned(
        options.trace,
        options.trace_format,
        options.time_scale,
        options.length_scale,
        options.max_tokens,
        options.max_requests,
    )


@lru_cache(maxsize=1)  # a run asks several times, and a file may have 100 MB
def _planned(
    path: Path, name: str, time: float, length: float, most_tokens: int, requests: int
) -> Trace:
    trace = read_trace(path, name).scaled(time=time, length=length)
    if most_tokens:
        trace = trace.without_longer(most_tokens)
    if requests:
        trace = trace.first(requests)
    if not trace.sessions:
        raise ValueError(
            f"found no request of at most {most_tokens} tokens in {path}; expected a larger "
            "--max-tokens or a smaller --length-scale."
        )
    return trace


def offered_qps(trace: Trace) -> float | None:
    """Return the requests per second of a trace with arrivals; None for sessions."""
    times_s = [request.at_s for request in trace.requests]
    span_s = max(times_s) - min(times_s)
    return len(times_s) / span_s if trace.timed and span_s > 0 else None


def trace_users(arguments: argparse.Namespace) -> int:
    """Return how many users hold a trace: -u, or enough where the trace has arrivals."""
    if arguments.num_users:
        return int(arguments.num_users)
    return IN_FLIGHT if arguments.trace and has_arrivals(Path(arguments.trace)) else 1


def trace_sessions(trace: Trace, options: Options, *, key: str) -> Iterator[Session]:
    """Return the sessions of a trace: at their times, or as soon as a user is free."""
    begin_s = min(session[0].at_s for session in trace.sessions)
    for number, requests in enumerate(trace.sessions):
        user_id = options.init_user_id + 1 + number
        yield Session(
            user_id=user_id,
            first_send_s=requests[0].at_s - begin_s if trace.timed else None,
            gap_s=None,
            turns=partial(_turns, requests, trace.block_tokens, key, user_id),
        )


def _turns(
    requests: tuple[Request, ...], block_tokens: int, key: str, user_id: int
) -> Iterator[Turn]:
    gaps_s = [None, *(later.at_s - earlier.at_s for earlier, later in pairwise(requests))]
    for k, (request, gap_s) in enumerate(zip(requests, gaps_s, strict=True), 1):
        yield Turn(
            question=k,
            round=k,
            prompt="",
            answer="",
            answer_tokens=request.output_tokens,
            tokens=prompt_tokens(
                request, block_tokens=block_tokens, key=key, alone=f"{user_id} {k}"
            ),
            gap_s=gap_s,
        )
