"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lmcache_xpu.errors import SettingsError, VersionError


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    # ok; warn: it may run, not well; fail: it will not; skip: not looked at
    outcome: Literal["ok", "warn", "fail", "skip"]
    name: str  # of what was checked
    found: str  # the state of things, or why it was not looked at
    advice: str = ""  # what to do, if anything
    expected: str = ""  # in place of what was found, where an error says it


# A name, the state of things, and advice where there is something to do.
ok, warn = partial(Check, "ok"), partial(Check, "warn")
fail, skip = partial(Check, "fail"), partial(Check, "skip")


def passes(name: str, state: str, check: Callable[..., object], *arguments: object) -> Check:
    """Return `state` as ok, or as fail the SettingsError or VersionError that a check raises."""
    try:
        check(*arguments)
    except (SettingsError, VersionError) as error:
        return fail(name, error.found, error.fix, error.expected)
    return ok(name, state)
