"""Options that several commands have."""

from __future__ import annotations

import math
from typing import Annotated

import typer

__all__ = ["TimeoutS"]


def _finite(seconds: float) -> float:
    """Refuse nan and inf, which are floats to a command line."""
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds.")
    return seconds


TimeoutS = Annotated[
    float,
    typer.Option(min=1, callback=_finite, help="Seconds until an engine starts or answers."),
]
