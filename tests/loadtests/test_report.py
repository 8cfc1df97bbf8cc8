"""The report of a comparison, whole or without its pictures."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from matplotlib.figure import SubFigure
from measured_runs import arms, slo_file

from loadtests import report
from loadtests.answer import Answer, Kind
from loadtests.comparison import Verdict
from loadtests.report import write_report

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_the_report_of_a_comparison_is_whole(tmp_path):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1, ended_by="server gone")
    write_report(made, tmp_path, slo_file(tmp_path), facts={"command": "make <it>"})
    page = (tmp_path / "report.html").read_text()
    verdict = json.loads((tmp_path / "summary.json").read_text())["verdict"]
    yes = page.index(f'<strong style="color: {Kind.YES.colour}">YES:</strong> CPU tier.')
    assert yes < page.index("<h2>")
    assert "none: the run was cut short (server gone)." in verdict
    assert "make &lt;it&gt;" in page or "make \\u003cit\\u003e" in page
    assert page.count("data:image/png") == 4
    assert page.index("In short") < page.index("Thresholds")
    width, height = struct.unpack(">II", (tmp_path / "summary.png").read_bytes()[16:24])
    assert width > height > 400


def test_a_picture_that_fails_costs_the_picture_alone(tmp_path, monkeypatch):
    def broken(*_):
        assert (tmp_path / "summary.json").exists()
        raise OverflowError("too wide")

    monkeypatch.setattr(report, "draw", broken)
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1)
    write_report(made, tmp_path, slo_file(tmp_path), facts={})
    assert "OverflowError" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("kind", "code"),
    [(Kind.YES, "32"), (Kind.NO, "31"), (Kind.NOT_REACHED, "33"), (Kind.UNKNOWN, "90")],
)
def test_a_terminal_shows_the_answer_last_and_in_its_colour(kind, code, monkeypatch, capsys):
    verdict = Verdict([Answer(kind, "so it is.")], ["Threshold missed: [this]."], [])
    words = f"Threshold missed: [this].\nReport: report.html\n\n{kind.value}: so it is.\n"

    def said(**variables):
        with monkeypatch.context() as patch:
            for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            verdict.show(Path("report.html"))
        return capsys.readouterr().out

    assert said() == words  # no terminal
    assert code in re.findall(r"\d+", said(FORCE_COLOR="1", TERM="xterm").splitlines()[-1])
    assert f"{code}m" not in said(FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")


def test_the_picture_of_a_whole_report_has_each_missed_threshold(tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr(
        SubFigure, "text", lambda _, x, y, line, color, **kind: written.update({line: color})
    )
    write_report(arms(tmp_path, base_s=1.0, cpu_s=0.5), tmp_path, slo_file(tmp_path), facts={})
    summary = json.loads((tmp_path / "summary.json").read_text())
    missed = [check["what"] for check in summary["checks"] if not check["holds"]]
    assert missed
    shown = " ".join(line for line, colour in written.items() if colour == Kind.NO.colour)
    assert all(f"Threshold missed: {what}." in shown for what in missed)
    assert written[next(iter(written))] == Kind.YES.colour
