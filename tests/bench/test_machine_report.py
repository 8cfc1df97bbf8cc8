"""`lmcache-xpu report`: one file, whatever happens to its parts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmcache_xpu.bench import machine_report
from lmcache_xpu.bench.machine_report import MachineReport
from lmcache_xpu.bench.redaction import Redactor
from lmcache_xpu.bench.runner import Result
from lmcache_xpu.cli import app
from lmcache_xpu.errors import EngineError


def everything(path: Path) -> dict:
    """The JSON block of a report."""
    block = path.read_text().rpartition("```json\n")[2]
    return json.loads(block.removesuffix("```\n"))


def make(path: Path, **environ: str) -> MachineReport:
    return MachineReport(path, "lmcache-xpu report", Redactor(environ))


class Lines(Console):
    """A console that keeps what is printed."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=500)

    @property
    def shown(self) -> list[str]:
        return self.file.getvalue().splitlines()


def good(*_):
    return True, {"device": "cpu", "text": "device: cpu"}


def test_parts_that_fail_are_entries_and_lose_no_other(tmp_path):
    def fail(*_):
        raise EngineError("a driver that hangs", "an answer")

    report = make(tmp_path / "r.md")
    console = Lines()
    parts = {"machine": good, "doctor": fail, "bench": lambda *_: (False, {})}
    assert report.run(parts, console) is False
    results = everything(tmp_path / "r.md")["parts"]
    assert [results[name]["outcome"] for name in results] == ["ok", "failed", "bad"]
    assert results["machine"]["facts"] == {"device": "cpu"}
    text = (tmp_path / "r.md").read_text()
    assert "EngineError: found a driver that hangs" in text
    assert "| doctor | **failed**: see below |" in text
    assert len(console.shown) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]


def test_the_file_is_there_from_the_start_and_after_each_step(tmp_path):
    path, outcomes = tmp_path / "r.md", []

    def look(console, save):
        outcomes.append(everything(path)["parts"]["later"]["outcome"])
        save({"engines": 1})
        outcomes.append(everything(path)["parts"]["now"]["facts"])
        return True, {"engines": 2}

    report = make(path)
    assert report.run({"now": look, "later": good}, Lines())
    assert outcomes == ["not run", {"engines": 1}]
    assert everything(path)["parts"]["now"]["facts"] == {"engines": 2}


def test_ctrl_c_leaves_what_was_measured(tmp_path):
    def stop(console, save):
        save({"exact": 1.0})
        raise KeyboardInterrupt

    report = make(tmp_path / "r.md")
    with pytest.raises(KeyboardInterrupt):
        report.run({"a": good, "b": stop, "c": good}, Lines())
    results = everything(tmp_path / "r.md")["parts"]
    assert [results[name]["outcome"] for name in "abc"] == ["ok", "interrupted", "not run"]
    assert results["b"]["facts"] == {"exact": 1.0}


def test_secrets_of_facts_and_errors_are_in_no_part_of_the_file(tmp_path):
    def fail(*_):
        raise RuntimeError("refused: s3cret-key at 10.1.2.3")

    def tell(*_):
        return True, {"text": "key s3cret-key", "path": ["/home/bob/x"]}

    report = make(tmp_path / "r.md", API_KEY="s3cret-key")
    report.run({"a": fail, "b": tell}, console := Lines())
    for text in ((tmp_path / "r.md").read_text(), *console.shown):
        assert not [word for word in ("s3cret", "10.1.2.3", "bob") if word in text]


@pytest.fixture
def stand_ins(monkeypatch):
    """Engines and programs that answer at once."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(machine_report, "built_for", lambda: "cpu")
    exact = [1.0]

    def run(shape, variants, jobs, *, save, **_):
        results = [
            Result(variant.name, variant.title, exact=None if variant.name == "none" else exact[0])
            for variant in variants
        ]
        save(results)
        return results

    def ask(program, console):
        if "doctor" in program:
            checks = [{"outcome": "ok", "name": "transfer", "found": "every byte", "advice": ""}]
            return 0, {"ok": True, "checks": checks}
        return 0, {"device": "cpu"}

    monkeypatch.setattr(machine_report.runner, "run", run)
    monkeypatch.setattr(machine_report, "_ask_python", ask)
    return exact


@pytest.mark.parametrize("options", [[], ["--quick"]])
def test_the_command_writes_one_file(stand_ins, tmp_path, options):
    path = tmp_path / "r.md"
    done = CliRunner().invoke(app, ["report", str(path), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    answer = everything(path)
    assert list(answer["parts"]) == ["machine", "doctor", "bench"]
    assert {part["outcome"] for part in answer["parts"].values()} == {"ok"}
    assert "100.00% of the blocks are the same, to the byte" in path.read_text()
    engines = [result["variant"] for result in answer["parts"]["bench"]["facts"]["results"]]
    assert engines == ["none", "ours"] + ["ours-layerwise"] * (not options)


def test_other_bytes_end_with_1(stand_ins, tmp_path):
    stand_ins[0] = 0.5
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r.md")], catch_exceptions=False)
    assert done.exit_code == 1
    assert everything(tmp_path / "r.md")["parts"]["bench"]["outcome"] == "bad"


def test_a_file_that_exists_or_can_not_be_written_is_refused_first(stand_ins, tmp_path):
    (tmp_path / "r.md").write_text("an earlier one")
    for path, words in (("r.md", "which exists"), ("nodir/r.md", "can't be written")):
        done = CliRunner().invoke(app, ["report", str(tmp_path / path)])
        assert (done.exit_code, words in done.stderr) == (2, True)
    assert (tmp_path / "r.md").read_text() == "an earlier one"


def test_a_program_that_dies_or_hangs_says_so(monkeypatch):
    def ask(program):
        return machine_report._ask_python(program, Console(quiet=True))

    with pytest.raises(EngineError, match="exit code -11"):
        ask("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(machine_report, "DOCTOR_S", 0.5)
    with pytest.raises(EngineError, match="hangs"):
        ask("import time; time.sleep(60)")
    monkeypatch.setattr(machine_report, "DOCTOR_S", 60)
    noisy = (
        "import json; print('{noise}'); print(json.dumps({'a': {'b': 1}}, indent=1)); print('x')"
    )
    assert ask(noisy) == (0, {"a": {"b": 1}})
