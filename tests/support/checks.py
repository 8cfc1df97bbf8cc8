"""What a check of the doctor says, and what it is asked about."""

from __future__ import annotations

from lmcache_xpu.launch.machine import TorchFacts
from lmcache_xpu.launch.settings import Settings

GIB = 2**30
B60 = TorchFacts("2.14.0+xpu", (("Intel Arc Pro B60", 24 * GIB),))


def load(**values):
    return Settings.load({"model": "org/model", **values})


def said(check, outcome, *words):
    """The check has this outcome, and its text these words."""
    assert check.outcome == outcome, check
    text = f"{check.found} {check.advice}"
    assert all(word in text for word in words), text
    assert bool(check.advice) == (outcome in ("warn", "fail")), check
    return True
