"""What a fault must not leave behind, and what it must have counted."""

from __future__ import annotations

from engine import Engine


def leaks(engine: Engine) -> dict[str, object]:
    """What must be the same after a fault as before: all that outlives a request."""
    engine.settle()
    seen = engine.inside("look")
    left = {name: seen[name] for name in ("references", "pins", "lookup_pins", "storers")}
    # What the pool has given out beyond what the CPU tier holds.
    left["unaccounted_bytes"] = (seen["allocated_bytes"] or 0) - seen["held_bytes"]
    return left


CLEAN = {"references": [], "pins": [], "lookup_pins": 0, "storers": 0, "unaccounted_bytes": 0}


def fallbacks(engine: Engine) -> float:
    return engine.metrics().sum("lmcache_xpu_fallbacks_total")


def errors(engine: Engine, direction: str, tier: str) -> float:
    return engine.metrics().sum("lmcache_xpu_errors_total", direction=direction, tier=tier)
