"""The report of a comparison, whole or without its pictures."""

from __future__ import annotations

import json
import struct

import pytest
from measured_runs import arms, slo_file

from loadtests import report
from loadtests.report import write_report

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_the_report_of_a_comparison_is_whole(tmp_path):
    made = arms(tmp_path, base_s=1.0, cpu_s=0.1, ended_by="server gone")
    write_report(made, tmp_path, slo_file(tmp_path), facts={"command": "make <it>"})
    page = (tmp_path / "report.html").read_text()
    verdict = json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert page.index("<strong>YES:</strong> CPU tier.") < page.index("<h2>")
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
