"""What Prometheus answered to the dashboard's queries: recorded once, drawn as often as needed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests.pictures.dashboard import Panel, Query, expand, label
from loadtests.pictures.prometheus import SCRAPE_S, Prometheus

__all__ = ["Recording", "Series"]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a panel.

    Args:
        name: in the legend.
        values: one for each point in time; nan where there is none.
    """

    name: str
    values: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Answers to the queries of a dashboard over one load test.

    Args:
        start: of the load, in seconds since 1970.
        end: of the load.
        step_s: from one point to the next.
        facts: machine, versions and command.
        answers: Prometheus's series, by what it was asked.
    """

    start: float
    end: float
    step_s: float
    facts: dict[str, Any]
    answers: dict[str, list[dict[str, Any]]]

    @classmethod
    def ask(
        cls,
        prometheus: Prometheus,
        panels: Sequence[Panel],
        *,
        start: float,
        end: float,
        facts: dict[str, Any],
    ) -> Recording:
        """Ask all queries of the panels, as Grafana would for this time."""
        start, end = (math.floor(moment / SCRAPE_S) * SCRAPE_S for moment in (start, end))
        asked = {
            expand(query.expression, scrape_s=SCRAPE_S)
            for panel in panels
            for query in panel.queries
        }
        answers = {
            query: prometheus.range(query, start=start, end=end, step_s=SCRAPE_S)
            for query in sorted(asked)
        }
        return cls(start=start, end=end, step_s=SCRAPE_S, facts=facts, answers=answers)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording's file."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write a file, a line for each query."""
        whole = asdict(self)
        answers = whole.pop("answers")
        lines = [f"  {json.dumps(query)}: {json.dumps(answers[query])}" for query in answers]
        head = json.dumps(whole).removesuffix("}")
        path.write_text(f'{head}, "answers": {{\n' + ",\n".join(lines) + "\n}}\n")

    @property
    def minutes(self) -> list[float]:
        """The points in time, since the load began."""
        count = round((self.end - self.start) / self.step_s) + 1
        return [i * self.step_s / 60 for i in range(count)]

    def series(self, query: Query) -> list[Series]:
        """Return what a query showed, with a gap wherever Prometheus had no value."""
        drawn = []
        for answer in self.answers[expand(query.expression, scrape_s=self.step_s)]:
            at = {round((moment - self.start) / self.step_s): v for moment, v in answer["values"]}
            values = [float(at.get(i, "nan")) for i in range(len(self.minutes))]
            drawn.append(Series(label(query.legend, answer["metric"]), values))
        return drawn
