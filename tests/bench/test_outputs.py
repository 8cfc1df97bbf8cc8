"""The file of `bench engine`: tried first, and written after each row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_xpu.bench.runner import Result
from lmcache_xpu.cli import app

RESULT = Result("ours", "ours", exact=1.0, rounds={"1024": [{"tier": 4}]})


def bench(*options: str | Path):
    words = ["bench", "engine", "--shape", "small", *map(str, options)]
    return CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.fixture
def runs(monkeypatch):
    """Each measurement that was begun; one takes no time and has one result."""
    begun = []

    def run(shape, variants, jobs, *, save, **_):
        begun.append(shape.name)
        save([RESULT])
        return [RESULT]

    monkeypatch.setattr("lmcache_xpu.bench.runner.run", run)
    monkeypatch.setattr("lmcache_xpu.bench.runner.machine", lambda: {"device": "cpu"})
    monkeypatch.setattr("lmcache_xpu.bench.shapes.built_for", lambda: "cpu")
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    return begun


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "nodir/x.json"], "--json nodir/x.json, which can't be written (No such file"),
        (["--json", "/"], "--json /, which can't be written (Is a directory)"),
        (["--json", "/proc/x"], "--json /proc/x"),
        (["--variant", "theirs"], "one of none"),
        (["--timeout-s", "0"], "--timeout-s"),
        (["--timeout-s", "nan"], "--timeout-s"),
        (["--timeout-s", "inf"], "--timeout-s"),
        (["--repeats", "-1"], "--repeats"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_measured(
    runs, tmp_path, monkeypatch, options, words
):
    monkeypatch.chdir(tmp_path)
    done = bench("--json", "good.json", *options)
    assert (done.exit_code, runs) == (2, [])
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_fails_late_costs_no_table(runs, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", fail)
    done = bench("--json", tmp_path / "x.json")
    assert done.exit_code == 2
    assert "the disk is full" in done.stderr
    assert "Prompts of 1024 tokens, ms" in done.stdout


def test_what_was_measured_is_written_after_each_row(runs, tmp_path, monkeypatch):
    """So that Ctrl-C, or an engine that takes the process along, costs one row."""

    def run(*_, save, **__):
        save([RESULT])
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_xpu.bench.runner.run", run)
    assert bench("--json", tmp_path / "x.json").exit_code == 130
    page = json.loads((tmp_path / "x.json").read_text())
    assert page["machine"] == {"device": "cpu"}
    assert [result["medians"] for result in page["results"]] == [{"1024": {"tier": 4}}]
