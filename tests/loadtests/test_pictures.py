"""The pictures of docs/: drawn from recorded answers, and every one can be renewed."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import httpx
import pytest
import typer

from lmcache_xpu.errors import EngineError
from loadtests.pictures.__main__ import DASHBOARD, RECORDING, SUMMARY, main
from loadtests.pictures.dashboard import expand, label, read_dashboard
from loadtests.pictures.drawing import draw_dashboard, shown
from loadtests.pictures.prometheus import SCRAPE_S, Prometheus
from loadtests.pictures.recording import Recording
from loadtests.pictures.units import text

# Stands in for Prometheus: it answers a query with what it was told to scrape, and how often.
PROGRAM = """#!{python}
import json, sys, yaml
from http.server import BaseHTTPRequestHandler, HTTPServer
options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
config = yaml.safe_load(open(options["config.file"]))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        query = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answer = {{"status": "error", "error": "no"}} if "bad" in query else {{
            "status": "success", "data": {{"result": [{{"config": config, "query": query}}]}}}}
        self.do_GET()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *_): pass
host, port = options["web.listen-address"].split(":")
HTTPServer((host, int(port)), Handler).serve_forever()
"""
ROOT = Path(__file__).resolve().parents[2]
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
PANELS = read_dashboard()
ASKED = {expand(query.expression, scrape_s=5) for panel in PANELS for query in panel.queries}


@pytest.fixture(scope="module")
def recording():
    return Recording.read(RECORDING)


def test_the_recording_answers_this_dashboard(recording):
    """If not: the dashboard has changed since. Renew it: `python -m loadtests.pictures`."""
    assert recording.answers.keys() == ASKED


def test_the_recording_is_of_a_load_that_reached_the_tiers(recording):
    values = {
        series.name: max(value for value in series.values if math.isfinite(value))
        for panel in PANELS
        if panel.title == "Bytes per second"
        for query in panel.queries
        for series in recording.series(query)
    }
    names = ("cpu load", "cpu store", "disk load", "disk store")
    assert [name for name in names if not values[name] > 0] == []


def test_every_panel_is_drawn_with_its_series(recording):
    panels = shown(PANELS, recording)
    assert len(panels) >= 30
    assert not any(panel.title.startswith("GPU ") for panel in panels)  # recorded on a CPU
    figure = draw_dashboard(PANELS, recording)
    titles = [drawn.get_text() for axes in figure.axes for drawn in axes.texts]
    assert [panel.title for panel in panels if panel.title not in titles] == []
    legends = [
        {entry.get_text().strip() for entry in axes.get_legend().get_texts()}
        for axes in figure.axes
        if axes.get_legend()
    ]
    for panel in panels:
        lines = [line for query in panel.queries for line in recording.series(query)]
        names = {line.name for line in lines if any(value > 0 for value in line.values)}
        assert panel.kind != "timeseries" or any(names <= legend for legend in legends), panel


def test_of_many_series_those_at_zero_are_counted():
    [panel] = [panel for panel in PANELS if panel.title == "Requests per second"]
    [query] = panel.queries
    reasons = {"length": "1", "stop": "0", "abort": "0", "error": "0", "repetition": "0"}
    answer = [
        {"metric": {"finished_reason": reason}, "values": [[0, value], [5, value]]}
        for reason, value in reasons.items()
    ]
    answers = {expand(query.expression, scrape_s=5): answer}
    figure = draw_dashboard([panel], Recording(start=0, end=5, step_s=5, facts={}, answers=answers))
    [legend] = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [entry.get_text() for entry in legend.get_texts()] == ["length", "4 more at 0"]


def test_a_line_has_the_recorded_values_and_gaps():
    [panel] = [panel for panel in PANELS if panel.title == "CPU tier"]
    used, limit = (expand(query.expression, scrape_s=5) for query in panel.queries)
    answer = [{"metric": {}, "values": [[100, "1024"], [110, "2048"]]}]
    answers = {used: answer, limit: []}
    recording = Recording(start=100, end=110, step_s=5, facts={}, answers=answers)
    figure = draw_dashboard([panel], recording)
    [line] = [line for axes in figure.axes for line in axes.lines]
    assert list(line.get_xdata()) == recording.minutes == [0, 5 / 60, 10 / 60]
    assert list(line.get_ydata())[::2] == [1024, 2048]
    assert math.isnan(line.get_ydata()[1])


def test_a_panel_without_values_says_so():
    [panel] = [panel for panel in PANELS if panel.title == "Errors and fallbacks per second"]
    asked = [expand(query.expression, scrape_s=5) for query in panel.queries]
    nothing = [{"metric": {"tier": "cpu"}, "values": [[0, "NaN"]]}]
    answers = dict.fromkeys(asked, nothing)
    recording = Recording(start=0, end=10, step_s=5, facts={}, answers=answers)
    figure = draw_dashboard([panel], recording)
    assert "No data" in [drawn.get_text() for axes in figure.axes for drawn in axes.texts]


def test_prometheus_is_asked_what_grafana_asks():
    asked = []

    class Prometheus:
        def range(self, expression, **times):
            asked.append((expression, times))
            return []

    recording = Recording.ask(Prometheus(), PANELS, start=1003, end=1059, facts={})
    assert all(times == {"start": 1000, "end": 1055, "step_s": 5} for _, times in asked)
    assert [expression for expression, _ in asked if "$" in expression] == []
    assert recording.answers.keys() == ASKED


def test_prometheus_scrapes_the_engine_alone_and_is_ended(tmp_path):
    program = tmp_path / "prometheus"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    with Prometheus.watching("127.0.0.1:1", program=str(program), folder=tmp_path) as prometheus:
        [answer] = prometheus.range("up", start=0, end=10, step_s=5)
        with pytest.raises(EngineError, match="Prometheus refuses bad: no"):
            prometheus.range("bad", start=0, end=10, step_s=5)
    assert answer["query"] == "query=up&start=0&end=10&step=5"
    assert answer["config"]["global"]["scrape_interval"] == f"{SCRAPE_S:g}s"
    [job] = answer["config"]["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:1"]}]
    with pytest.raises(httpx.ConnectError):
        prometheus.range("up", start=0, end=10, step_s=5)


def test_variables_and_legends_are_filled_in_as_grafana_does():
    query = 'sum(rate(a_total{b=~"$b", c="d", e=~"$e"}[$__rate_interval])) / f{e=~"$e"}'
    assert expand(query, scrape_s=5) == 'sum(rate(a_total{c="d", }[20s])) / f'
    assert label("{{tier}} {{direction}}", {"tier": "cpu", "direction": "load"}) == "cpu load"
    assert label("error: {{tier}} {{reason}}", {"tier": "cpu"}) == "error: cpu"


def test_a_recording_is_read_as_it_was_written(tmp_path):
    answers = {"a": [{"metric": {"x": "1"}, "values": [[0, "1"]]}], "b": []}
    recording = Recording(start=0, end=5, step_s=5, facts={"date": "today"}, answers=answers)
    recording.write(tmp_path / "file.json")
    assert Recording.read(tmp_path / "file.json") == recording


@pytest.mark.parametrize(
    ("value", "unit", "highest", "expected"),
    [
        (0.25, "s", 0.9, "250 ms"),
        (2.5, "s", 3, "2.5 s"),
        (0.5, "percentunit", 1, "50%"),
        (3 * 2**20, "bytes", 2**24, "3 MiB"),
        (2.5e8, "Bps", 3e8, "250 MB/s"),
        (1500, "short", 2000, "1.5 K"),
        (0.4, "reqps", 1, "0.4 req/s"),
        (0, "bytes", 2**30, "0"),
    ],
)
def test_numbers_have_grafanas_units(value, unit, highest, expected):
    assert text(value, unit, highest) == expected


def test_every_unit_of_the_dashboard_can_be_written():
    assert all(text(1.0, panel.unit, 1.0) for panel in PANELS)


def test_pictures_of_documents_exist_and_can_be_renewed():
    """By `python -m loadtests.pictures`, or by the measurement in whose folder they lie."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in IMAGE.findall(page.read_text()):
            if "://" in name or name.endswith("badge.svg"):
                continue
            picture = (page.parent / name).resolve()
            assert picture.exists(), f"{page}: {name}"
            measured = picture.with_name("summary.json"), picture.with_name("capacity.json")
            assert picture in (DASHBOARD, SUMMARY) or any(path.exists() for path in measured)
    assert "`python -m loadtests.pictures`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_without_prometheus_nothing_is_started(capsys):
    with pytest.raises(typer.Exit) as refused:
        main(prometheus="no-such-prometheus")
    assert refused.value.exit_code == 2
    assert capsys.readouterr().err.startswith("pictures: found no program no-such-prometheus;")
