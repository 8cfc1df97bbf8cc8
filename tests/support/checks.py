"""What a check of the doctor says."""

from __future__ import annotations


def said(check, outcome, *words):
    """The check has this outcome, and its text these words."""
    assert check.outcome == outcome, check
    text = f"{check.found} {check.advice}"
    assert all(word in text for word in words), text
    assert bool(check.advice) == (outcome in ("warn", "fail")), check
    return True
