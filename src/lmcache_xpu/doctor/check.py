"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Outcome", "fail", "ok", "skip", "warn"]

Outcome = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Args:
        outcome: ok; warn: it may run, not well; fail: it will not; skip: not looked at.
        name: what was checked.
        found: what is the case, or why it was not looked at.
        advice: what to do; empty where there is nothing to do.
    """

    outcome: Outcome
    name: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check("ok", name, found)


def warn(name: str, found: str, advice: str) -> Check:
    """It may run, and not well."""
    return Check("warn", name, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    """It will not run."""
    return Check("fail", name, found, advice)


def skip(name: str, why: str) -> Check:
    """Not looked at."""
    return Check("skip", name, why)
