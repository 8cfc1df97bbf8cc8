"""`lmcache-xpu report`: one file, whatever happens to its parts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmcache_xpu.bench import machine_report
from lmcache_xpu.bench.machine_report import MachineReport, Part, parts
from lmcache_xpu.bench.redaction import Redactor
from lmcache_xpu.cli import app
from lmcache_xpu.verify.judge import Result as Case

GOOD = Part(("print('device: cpu')",))


def make(directory: Path, **environ: str) -> MachineReport:
    return MachineReport(directory / "r.md", "lmcache-xpu report", Redactor(environ), directory)


class Lines(Console):
    """A console that keeps what is printed."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=500)

    @property
    def shown(self) -> list[str]:
        return self.file.getvalue().splitlines()


def test_parts_that_fail_are_entries_and_lose_no_other(tmp_path, monkeypatch):
    crash = "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    report = make(tmp_path)
    programs = {
        "machine": GOOD,
        "doctor": Part((crash,)),
        "hangs": Part(("import time; print('so far', flush=True); time.sleep(60)",), limit_s=1),
        "bench": Part(("raise SystemExit(1)",)),
    }
    assert report.run(programs, console := Lines()) is False
    words = [outcome.word.split(":")[0] for outcome in report.outcomes.values()]
    assert words == ["ok", "**failed**", "**failed**", "**bad news**"]
    text = (tmp_path / "r.md").read_text()
    assert "| doctor | **failed**: exit code -11 |" in text
    assert "| hangs | **failed**: no answer within 1 s |" in text
    assert "## Machine\n\n```text\ndevice: cpu\n```" in text
    assert "```text\nbefore\n" in text
    assert "```text\nso far\n" in text
    assert len(console.shown) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]


def test_the_file_is_there_from_the_start_and_has_the_figures(tmp_path):
    path, figures = tmp_path / "r.md", tmp_path / "now.json"
    look = f"""
import json
text = open({str(path)!r}).read()
assert "| now | was running" in text and "| later | not run" in text
json.dump({{"exact": 1.0, "path": "/home/bob/x"}}, open({str(figures)!r}, "w"))
"""
    assert make(path.parent).run({"now": Part((look,)), "later": GOOD}, Lines())
    block = path.read_text().rpartition("```json\n")[2].removesuffix("```\n")
    assert json.loads(block) == {"exact": 1.0, "path": "<path>"}


def test_ctrl_c_ends_the_program_and_leaves_what_was_measured(tmp_path, monkeypatch):
    ended = []

    class Program(machine_report.subprocess.Popen):
        def communicate(self, *args, **kwargs):
            raise KeyboardInterrupt

        def terminate(self):
            ended.append(self.args[2:])
            super().terminate()

    report = make(tmp_path)
    (tmp_path / "b.json").write_text('{"exact": 1.0}')
    monkeypatch.setattr(machine_report.subprocess, "Popen", Program)
    with pytest.raises(KeyboardInterrupt):
        report.run({"b": Part(("import time; time.sleep(60)",)), "c": GOOD}, Lines())
    assert ended == [["import time; time.sleep(60)"]]
    text = (tmp_path / "r.md").read_text()
    assert "| b | interrupted |" in text
    assert "| c | not run |" in text
    assert '"exact": 1.0' in text


def test_secrets_of_what_is_printed_are_in_no_part_of_the_file(tmp_path):
    fail = "raise RuntimeError('refused: s3cret-key at 10.1.2.3')"
    tell = "print('key s3cret-key in', '/home/bob/' + 60 * 'x' + '/bob')"
    report = make(tmp_path, API_KEY="s3cret-key")
    report.run({"a": Part((fail,)), "b": Part((tell,))}, console := Lines())
    text = (tmp_path / "r.md").read_text()
    assert "RuntimeError: refused: (secret) at (address)" in text
    for shown in (text, *console.shown):
        assert not [word for word in ("s3cret", "10.1.2.3", "bob") if word in shown]


@pytest.mark.parametrize("quick", [False, True])
def test_the_bench_is_a_command_that_exists(monkeypatch, tmp_path, quick):
    """Of which the measuring alone is left out."""
    monkeypatch.setattr("lmcache_xpu.bench.shapes.built_for", lambda: "cpu")
    asked = {}

    def run(shape, variants, jobs, *, repeats, timeout_s, **_):
        engines = [variant.name for variant in variants]
        asked.update(engines=engines, jobs=[*jobs], how=(repeats, timeout_s))
        return []

    monkeypatch.setattr("lmcache_xpu.bench.runner.run", run)
    monkeypatch.setattr("lmcache_xpu.bench.runner.machine", lambda: {"device": "cpu"})
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    [_, *words] = parts(tmp_path, quick=quick, timeout_s=7)["bench"].words
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert asked["engines"] == ["none", "ours"] + ["ours-layerwise"] * (not quick)
    assert asked["jobs"][:: 1 if quick else 5] == ["1024", "4 x (1024 + 128)"]
    assert asked["how"] == (1 if quick else 3, 7)
    assert json.loads((tmp_path / "bench.json").read_text())["machine"] == {"device": "cpu"}


def test_what_verify_compared_is_in_the_file_as_it_was_written(monkeypatch, tmp_path):
    """Engines alone are left out."""
    cases = [Case("the same prompt, 255 tokens", 255, 224, compared=9, preemptions=1)]
    cases.append(Case("files", different=["block 1 (token 16), group 0, layer model.layers.0"]))
    monkeypatch.setattr("lmcache_xpu.launch.serve.built_for", lambda: "cpu")
    monkeypatch.setattr("lmcache_xpu.verify.judge.verify", lambda *_, **__: cases)
    monkeypatch.setattr("lmcache_xpu.bench.runner.machine", lambda: {"device": "cpu"})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    [_, *words] = parts(tmp_path, quick=False, timeout_s=7)["verify"].words
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 1
    report = make(tmp_path)
    report.run({"verify": GOOD}, Lines())
    head, _, block = (tmp_path / "r.md").read_text().rpartition("```json\n")
    assert head.endswith("## Verify, for programs\n\n")
    assert json.loads(block.removesuffix("```\n")) == json.loads(
        (tmp_path / "verify.json").read_text()
    )
    assert '"outcome": "WRONG"' in block


def test_the_command_writes_one_file(monkeypatch, tmp_path):
    def stand_ins(directory, *, quick, timeout_s):
        write = f"open({str(directory / 'bench.json')!r}, 'w').write('{{}}')"
        return {"machine": GOOD, "bench": Part((write,))}

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(machine_report, "parts", stand_ins)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r.md")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "r.md").read_text()
    assert "device: cpu" in text
    assert text.endswith("```json\n{}\n```\n")
    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]


def test_a_file_that_exists_or_can_not_be_written_is_refused_first(tmp_path):
    (tmp_path / "r.md").write_text("an earlier one")
    for path, words in (("r.md", "which exists"), ("nodir/r.md", "can't be written")):
        done = CliRunner().invoke(app, ["report", str(tmp_path / path)])
        assert (done.exit_code, words in done.stderr) == (2, True)
    assert (tmp_path / "r.md").read_text() == "an earlier one"
