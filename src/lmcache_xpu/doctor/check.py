"""The result of a check."""

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
        found: the state of things, or why it was not looked at.
        advice: what to do; empty where there is nothing to do.
    """

    outcome: Outcome
    name: str
    found: str
    advice: str = ""


def ok(name: str, state: str) -> Check:
    """Report that all is well."""
    return Check("ok", name, state)


def warn(name: str, state: str, advice: str) -> Check:
    """Report that an engine may run, and not well."""
    return Check("warn", name, state, advice)


def fail(name: str, state: str, advice: str) -> Check:
    """Report that no engine will run."""
    return Check("fail", name, state, advice)


def skip(name: str, reason: str) -> Check:
    """Report that this was not looked at."""
    return Check("skip", name, reason)
