"""Does it help? The one line that a report is written for, and its colour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from loadtests.figures import Figures
from loadtests.words import ms, of_tokens, percent

__all__ = ["Answer", "Kind", "of_run", "of_variant"]

USAGE = "vllm:kv_cache_usage_perc"


class Kind(Enum):
    """What a measurement says about offload."""

    YES = "YES"
    NO = "NO"
    NOT_REACHED = "YOUR LOAD NEVER REACHED THE TIERS"
    UNKNOWN = "NOT KNOWN"

    @property
    def colour(self) -> str:
        """The colour of pictures and pages, as `#rrggbb`."""
        return _LOOKS[self][0]

    @property
    def style(self) -> str:
        """The style of a terminal, as rich names it."""
        return _LOOKS[self][1]


_LOOKS = {
    Kind.YES: ("#007A5A", "bold green"),
    Kind.NO: ("#B3261E", "bold red"),
    Kind.NOT_REACHED: ("#8A6100", "bold yellow"),
    Kind.UNKNOWN: ("#666666", "bold bright_black"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and what it was found by.

    Args:
        kind: the answer.
        why: what was compared, with numbers of requests.
    """

    kind: Kind
    why: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.why}"


def of_run(figure: Figures) -> Answer:
    """Answer for one server: whether its tiers serve this load. How much sooner, it can't say."""
    if doubt := figure.get("doubt"):
        return Answer(Kind.UNKNOWN, doubt)
    if (missed := _not_reached(figure)) is not None:
        return missed
    return Answer(
        Kind.YES,
        f"the tiers serve this load. They held {_external(figure)}, n = {figure['requests']} "
        "requests. Nothing was compared: how much sooner answers come, `make loadtest-compare` "
        "says.",
    )


def of_variant(about: str, figure: Figures, base_about: str, base: Figures) -> Answer:
    """Answer for a variant: whether first tokens come sooner than without offload."""
    for name, doubt in ((about, figure.get("doubt")), (base_about, base.get("doubt"))):
        if doubt:
            return Answer(Kind.UNKNOWN, f"{about}. In {name}: {doubt}")
    if (missed := _not_reached(figure)) is not None:
        return Answer(missed.kind, f"{about}. {missed.why}")
    if "ttft_p50_ratio" not in figure:
        return Answer(
            Kind.UNKNOWN,
            f"{about}. Too few requests of rounds 2 and later: {_count(base)} without offload and "
            f"{_count(figure)} with it, 20 of each are needed.",
        )
    ratio, (low, high) = figure["ttft_p50_ratio"], figure["ttft_p50_ratio_ci"]
    medians = (ms(part["ttft_later_rounds_s"]["p50"]) for part in (base, figure))
    numbers = (
        f"median of rounds 2 and later {' to '.join(medians)}, n = {_count(base)} requests in "
        f"{_runs(base)} of {base_about} and {_count(figure)} in {_runs(figure)}"
    )
    interval = f"between {low:.1f} and {high:.1f} {_confidence(base, figure)}"
    if low > 1:
        why = f"{about}. First tokens come {ratio:.1f} times sooner ({interval}): {numbers}."
        return Answer(Kind.YES, why)
    slower = f"First tokens come {1 / ratio:.1f} times later" if high < 1 else "No clear gain"
    return Answer(Kind.NO, f"{about}. {slower} ({ratio:.2f} times, {interval}): {numbers}.")


def _not_reached(figure: Figures) -> Answer | None:
    hits = figure.get("hit_rates", {}).get("whole run")
    if hits is None:
        return Answer(
            Kind.UNKNOWN,
            "the server's page /metrics has no counters of vLLM, so nobody knows whether a cache "
            "took part. Give the engine's own page by --metrics-url.",
        )
    if hits["external_hits"]:
        return None
    said = f"0 of {hits['device_queries']:,.0f} prompt tokens, n = {figure['requests']} requests. "
    used = figure.get("most", {}).get(USAGE)
    if not hits["external_queries"]:
        said += "No tier was asked: does this engine run with offload?"
    elif hits["device_hits"]:
        full = "" if used is None else f", which was at most {used:.0%} full"
        if tokens := figure.get("engine_cache_tokens"):
            full = f", which holds {tokens:,.0f} tokens" + full.replace(", which", " and")
        said += (
            f"{percent(hits['device_rate'])} came from the engine's own cache{full}. Send more "
            "than it holds: more users (-u), longer histories (--user-history-prompt)."
        )
    else:
        said += "No prompt began like an earlier one, or what was stored was gone by then."
    return Answer(Kind.NOT_REACHED, said)


def _external(figure: Figures) -> str:
    hits = figure["hit_rates"]["whole run"]
    return of_tokens(hits["external_hits"], hits["device_queries"])


def _count(figure: Figures) -> int:
    return int(figure.get("ttft_later_rounds_s", {}).get("n", 0))


def _runs(figure: Figures) -> str:
    return "1 run" if figure["runs"] == 1 else f"{figure['runs']} runs"


def _confidence(base: Figures, figure: Figures) -> str:
    """What the interval knows of: how runs differ, only where there are several."""
    single = min(base["runs"], figure["runs"]) == 1
    return "with 95 % confidence" + (", within this run only" if single else "")
