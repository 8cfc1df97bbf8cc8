"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lmcache_xpu.errors import SettingsError, VersionError

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


# A name, the state of things, and advice where there is something to do.
ok, warn = partial(Check, "ok"), partial(Check, "warn")
fail, skip = partial(Check, "fail"), partial(Check, "skip")


def passes(name: str, state: str, check: Callable[..., object], *arguments: object) -> Check:
    """Report what a check found that raises SettingsError or VersionError; else that all is well.

    Args:
        name: what is checked.
        state: the state of things if it passes.
        check: is called with the arguments.
        arguments: of the check.
    """
    try:
        check(*arguments)
    except (SettingsError, VersionError) as error:
        return fail(name, error.found, error.fix)
    return ok(name, state)
