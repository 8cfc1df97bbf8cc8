"""Look at a trace before it is sent: `python -m loadtests.traces FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from loadtests.options import Options
from loadtests.traces.reuse import best_reuse
from loadtests.traces.sessions import offered_qps, planned
from loadtests.traces.summary import described

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
def main(
    trace: Annotated[Path, typer.Argument(help="File or folder")],
    trace_format: Annotated[str, typer.Option(help="As of the load test")] = "auto",
    time_scale: float = 1,
    length_scale: float = 1,
    max_requests: int = 0,
    max_tokens: int = 0,
    chunk_tokens: int = 256,
) -> None:
    """Say what a trace holds, scaled, and what could be reused of it at best."""
    try:
        options = Options.model_validate(
            {
                "trace": trace,
                "trace_format": trace_format,
                "time_scale": time_scale,
                "length_scale": length_scale,
                "max_requests": max_requests,
                "max_tokens": max_tokens,
                "chunk_tokens": chunk_tokens,
            }
        )
        plan = planned(options)
    except (ValidationError, ValueError) as error:
        lines = str(error) if not isinstance(error, ValidationError) else _short(error)
        print(f"traces: {lines}", file=sys.stderr)
        raise typer.Exit(2) from None
    requests = plan.requests
    if plan.timed:
        requests = sorted(requests, key=lambda request: request.at_s)
    best = best_reuse(requests, block_tokens=plan.block_tokens, chunk_tokens=chunk_tokens)
    longest = max(request.input_tokens + request.output_tokens for request in requests)
    answers = sum(request.output_tokens for request in requests) / len(requests)
    qps = offered_qps(plan)
    print(described(best))
    print(
        f"Sessions: {len(plan.sessions):,}. Longest request: {longest:,} tokens with its answer; "
        f"mean answer: {answers:,.0f}."
        + (f" Arrivals: {qps:.2f} requests/s." if qps else " Sessions begin when a user is free.")
    )


def _short(error: ValidationError) -> str:
    return "; ".join(
        f"--{str(item['loc'][0]).replace('_', '-')}: {item['msg']}, found {item['input']!r}"
        for item in error.errors()
    )


if __name__ == "__main__":
    app()
