"""A report: verdict, pictures, tables; as one HTML file, PNG files, and summary.json."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from loadtests import words
from loadtests.comparison import Arm, Verdict, compare, judge
from loadtests.figures import FEWEST, PERCENTILES, Figures, load
from loadtests.plots import draw
from loadtests.slo import Slo
from loadtests.summary_picture import draw_summary
from loadtests.words import amount, percent

__all__ = ["report_run", "write_report"]

TEMPLATE = "report.html.j2"
PATHS = ("report_dir", "slo", "conversations", "trace")
TIMES = (
    ("ttft_s", "Time to first token"),
    ("ttft_later_rounds_s", "  of rounds 2 and later"),
    ("ttft_first_round_s", "  of round 1, ramp-up included"),
    ("ttft_hit_s", "  half of the prompt or more from a cache, whole run"),
    ("ttft_missed_s", "  less of it, whole run"),
    ("intended_to_first_token_s", "From when it was due by the plan to the first token"),
    ("chunk_gap_s", "Between chunks, which may hold several tokens"),
    ("tpot_s", "Per token after the first (TPOT)"),
    ("e2e_s", "Whole request"),
)


def report_run(directory: Path, slo: Path) -> Verdict:
    """Report on the one run that is in a directory, in that directory."""
    run = load(directory)
    arm = Arm(name="server", about=f"{run.meta['workload']} on {run.meta['host']}", runs=[run])
    return write_report([arm], directory, slo, facts={})


def write_report(
    arms: Sequence[Arm], directory: Path, slo: Path, *, facts: dict[str, Any]
) -> Verdict:
    """Write report.html, summary.json and PNG files.

    Args:
        arms: what was measured; the first one is what the others are compared with.
        directory: where to write.
        slo: the file of thresholds.
        facts: about machine, versions and command; shown at the end.
    """
    limits = Slo.load(slo)
    by_arm = compare(arms, limits)
    verdict = judge(arms, by_arm, limits)
    settings = {arm.name: _settings(arm.runs[0].meta) for arm in arms if arm.runs}
    summary = {
        "answers": [{"answer": a.kind.value, "why": a.why} for a in verdict.answers],
        "verdict": verdict.lines,
        "holds": verdict.holds,
        "checks": [
            {"what": str(check), "found": check.value, "holds": check.holds}
            for check in verdict.checks
        ],
        "variants": by_arm,
        "settings": settings,
        "facts": facts,
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    pictures = _pictures(arms, by_arm, directory, verdict, summary)
    page = _environment().get_template(TEMPLATE)
    (directory / "report.html").write_text(
        page.render(
            arms=arms,
            by_arm=by_arm,
            verdict=verdict,
            pictures=[(caption, _embedded(path)) for caption, path in pictures],
            times=TIMES,
            percentiles=PERCENTILES,
            fewest=FEWEST,
            settings=settings,
            facts=facts,
            written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            goodput=limits.goodput,
        )
    )
    return verdict


def _pictures(
    arms: Sequence[Arm],
    by_arm: dict[str, Figures],
    directory: Path,
    verdict: Verdict,
    summary: dict[str, Any],
) -> list[tuple[str, Path]]:
    """Draw; a picture that can't be drawn costs the picture, not the report."""
    try:
        draw_summary(summary, directory)
        return draw(arms, by_arm, directory)
    except Exception as error:  # of matplotlib, on data that nobody foresaw
        verdict.sentences.append(f"The pictures could not be drawn: {error!r}.")
        return []


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings without those that only say where its files are."""
    options = {k: v for k, v in meta.get("options", {}).items() if k not in PATHS}
    return meta | {"options": options}


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"ms": _ms, "percent": percent, "amount": amount}
    return environment


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _ms(seconds: float | None) -> str:
    return words.ms(seconds).removesuffix(" ms")  # the table's heading has the unit
