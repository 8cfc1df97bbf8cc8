"""Numbers with Grafana's units, as a person reads them."""

from __future__ import annotations

import math

from matplotlib.ticker import Locator, MaxNLocator, MultipleLocator

__all__ = ["text", "tick_locator"]

# Of Grafana's units that the dashboard has: the step from one size to the next, and the sizes.
SIZES: dict[str, tuple[float, tuple[str, ...]]] = {
    "short": (1000, ("", " K", " Mil", " Bil")),
    "reqps": (1000, (" req/s", "K req/s")),
    "bytes": (1024, (" B", " KiB", " MiB", " GiB", " TiB")),
    "Bps": (1000, (" B/s", " kB/s", " MB/s", " GB/s")),
    "watt": (1000, (" W", " kW")),
    "celsius": (1000, (" °C",)),
}


def text(value: float, unit: str, highest: float) -> str:
    """Return a number with its unit.

    Args:
        value: the number.
        unit: Grafana's name for it.
        highest: of the axis; all its numbers have the same size of unit.
    """
    if value == 0 and unit != "percentunit":
        return "0"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if highest < 1 else f"{value:.3g} s"
    step, names = SIZES[unit]
    size = 0
    while highest >= step and size < len(names) - 1:
        highest, value, size = highest / step, value / step, size + 1
    return f"{value:.3g}{names[size]}"


def tick_locator(unit: str, highest: float) -> Locator:
    """Return where an axis that ends at `highest` has numbers: at round ones of its unit."""
    if unit == "bytes" and highest > 0:
        return MultipleLocator(2 ** math.ceil(math.log2(highest / 4)))
    return MaxNLocator(4)
