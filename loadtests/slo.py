"""Thresholds, and whether they hold."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loadtests.words import ms

__all__ = ["Check", "Goodput", "Slo", "Threshold"]

# Figures that thresholds are about, in words, and their unit.
WORDS = {
    "failure_rate": ("share of requests that failed", "%"),
    "client_lag_p95_s": ("lateness of the client itself (p95)", "ms"),
    "external_hit_rate": ("share that the tiers had of what the engine's own cache lacked", "%"),
    "found_rate_gain": ("prompt tokens found in any cache, more than without offload", "%"),
    "ttft_p50_ratio": ("gain in time to first token, median of rounds 2 and later", "times"),
    "ttft_p95_ratio": ("gain in time to first token, p95 of rounds 2 and later", "times"),
    "first_round_p50_ratio": ("gain in time to first token, median of round 1", "times"),
    "no_reuse_overhead": ("time that whole requests take longer where nothing is found", "%"),
    "goodput_share": ("share of answers that are good", "%"),
}


def _value(value: float | None, unit: str) -> str:
    assert value is not None, "a threshold has one bound"
    if unit == "%":
        return f"{value:.1%}"
    if unit == "ms":
        return ms(value)
    return f"{value:.3g}" + (" times" if unit == "times" else "")


class Goodput(BaseModel):
    """When an answer is good."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ttft_s: float = Field(gt=0)
    itl_s: float = Field(gt=0)


class Threshold(BaseModel):
    """A bound on one figure, of one variant or of all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    figure: str
    variant: str | None = None
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.min is None) == (self.max is None):
            raise ValueError(f"{self.figure} has to have either a min or a max")
        return self


@dataclass(frozen=True, slots=True)
class Check:
    """One threshold against one variant's figure; a figure that is missing doesn't hold."""

    threshold: Threshold
    variant: str
    value: float | None

    @property
    def holds(self) -> bool:
        """Whether the figure is there and within the bound."""
        low, high = self.threshold.min, self.threshold.max
        if self.value is None:
            return False
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    def __str__(self) -> str:
        low, high = self.threshold.min, self.threshold.max
        words, unit = WORDS.get(self.threshold.figure, (self.threshold.figure, "g"))
        bound = (
            f"at least {_value(low, unit)}" if low is not None else f"at most {_value(high, unit)}"
        )
        state = "was not measured" if self.value is None else f"is {_value(self.value, unit)}"
        return f"{self.variant}: {words} {state}, expected {bound}"


class Slo(BaseModel):
    """The file slo.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    goodput: Goodput
    run: tuple[Threshold, ...] = ()
    compare: tuple[Threshold, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            OSError: it can't be read.
            ValueError: it isn't TOML, or not as described in docs/guides/loadtest.md.
        """
        return cls.model_validate(tomllib.loads(path.read_text()))

    def check(
        self, thresholds: tuple[Threshold, ...], figures: Mapping[str, Mapping[str, Any]]
    ) -> list[Check]:
        """Each threshold against the figures of the variants that it is about.

        A variant that is named and was not run has no check.
        """
        return [
            Check(threshold, variant, figure.get(threshold.figure))
            for threshold in thresholds
            for variant, figure in figures.items()
            if threshold.variant in (None, variant)
        ]
