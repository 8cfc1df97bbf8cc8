"""Figures as people read them."""

from __future__ import annotations

__all__ = ["amount", "ms", "of_tokens", "percent"]

MISSING = "–"  # noqa: RUF001  # a dash in a table
BYTES = ("_bytes", "_usage")


def ms(seconds: float | None) -> str:
    """Return milliseconds with their unit."""
    if seconds is None:
        return MISSING
    digits = 1 if seconds < 0.01 else 0
    return f"{seconds * 1e3:,.{digits}f} ms"


def percent(share: float | None) -> str:
    """Return a share as percent."""
    return MISSING if share is None else f"{share:.0%}"


def of_tokens(part: float, total: float) -> str:
    """Return a number of tokens and its share of others."""
    share = f" ({part / total:.0%})" if total else ""
    return f"{part:,.0f} of {total:,.0f} prompt tokens{share}"


def amount(value: float | None, name: str = "") -> str:
    """Return a number as short as it says enough; bytes, by the metric's name, as MiB or GiB."""
    if value is None:
        return MISSING
    if any(part in name for part in BYTES) and "perc" not in name:
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
    if "perc" in name or name.endswith("_ratio"):
        return f"{value:.0%}"
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
