"""What a soak of LMCache's server has counted, which promises that breaks, and both as a table."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lmcache_xpu import versions

# That a server may hold a batch: 2 s, and what a busy host adds.
AT_MOST_S = 2.2


@dataclass
class Tally:
    """What has happened."""

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    batches: int = 0
    ties: int = 0
    compared: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


def verdict(report: dict[str, Any]) -> list[str]:
    """Return what broke a promise; nothing where all are kept."""
    tally: Tally = report["tally"]
    limit = AT_MOST_S + max(tally.computed_s)
    broken = [f"different: {each}" for each in tally.different]
    if max(tally.seconds) > limit:
        broken.append(f"a batch took {max(tally.seconds):.2f} s; at most {limit:.2f} s")
    if not report["answers"]:
        broken.append("the server is lost")
    if report["left"]:
        broken.append(f"no time for {len(report['left'])} faults more")
    return broken


def table(report: dict[str, Any], broken: list[str]) -> str:
    tally: Tally = report["tally"]
    installed, today = versions.installed(), datetime.now(UTC).date()
    seconds = sorted(tally.seconds)
    kills = tally.faults["kill"] + tally.faults["store"] + tally.faults["load"]
    rows = {
        "date, machine": f"{today}, {platform.machine()}, {os.cpu_count()} cores",
        "vLLM, LMCache": f"{installed.vllm}, {installed.lmcache}",
        "requests": f"{tally.requests:,}",
        "hits": f"{tally.hits:,}, {tally.tokens:,} tokens",
        "kills, each with a restart": f"{kills}: {tally.faults['store']} in the middle of a store, "
        f"{tally.faults['load']} of a load",
        "hangs (SIGSTOP, 0.3 to 4 s)": f"{tally.faults['hang']}",
        "answers that differ from the recomputed": f"{len(tally.different)}",
        "ties, which go as the batch does": f"{tally.ties}",
        "blocks of hits compared byte by byte": f"{tally.compared:,} in each layer",
        "batches": f"{tally.batches:,} of {tally.requests // tally.batches} requests",
        "a batch: median, longest": f"{seconds[len(seconds) // 2]:.2f} s, {seconds[-1]:.2f} s",
        "a batch that is computed: longest": f"{max(tally.computed_s):.2f} s",
        "hits again after the server listens: longest": f"{max(tally.back_s, default=0):.1f} s",
        "counted failures": ", ".join(f"{k} {v:.0f}" for k, v in sorted(report["errors"].items())),
        "time": f"{report['seconds']:.0f} s",
        "promises broken": "; ".join(broken) or "none",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())])
