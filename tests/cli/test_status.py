"""`lmcache-xpu status`: what is installed here, told without what libraries print."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lmcache_xpu import versions
from lmcache_xpu.cli import app

runner = CliRunner()


def run(*args):
    return runner.invoke(app, [str(arg) for arg in args], catch_exceptions=False)


@dataclasses.dataclass(frozen=True)
class FakeStatus:
    lmcache_version: str | None = "0.5.6"
    vllm_version: str | None = None
    torch_version: str | None = "2.13.0"
    tested: bool = False
    devices: dict = dataclasses.field(default_factory=lambda: {"xpu": ["a.B", "a.C"]})
    patches: dict = dataclasses.field(default_factory=lambda: {"c.d[x]": True, "e.f": False})


def test_status_for_people_and_for_programs(monkeypatch):
    monkeypatch.setattr("lmcache_xpu.vllm_hooks.patches.status", FakeStatus)
    monkeypatch.setattr(
        "lmcache_xpu.versions.installed", lambda: versions.Versions("0.5.6", None, "2.13.0")
    )
    lines = [" ".join(line.split()) for line in run("status").stdout.splitlines()]
    assert lines == [
        "Installed here",
        "lmcache 0.5.6",
        "vllm not installed",
        "torch 2.13.0",
        "versions not a tested combination",
        "",
        "An engine that starts here uses",
        "on xpu",
        "standard a.B",
        "layerwise a.C",
        "attributes of vLLM that it replaces",
        "in place c.d[x]",
        "missing e.f",
        "",
        "An engine that runs: lmcache-xpu status --url http://127.0.0.1:8000",
    ]
    assert json.loads(run("status", "--json").stdout) == dataclasses.asdict(FakeStatus())


def test_the_fields_that_status_shows_are_the_real_ones():
    from lmcache_xpu.vllm_hooks import patches

    names = {field.name for field in dataclasses.fields(patches.status())}
    assert names >= {field.name for field in dataclasses.fields(FakeStatus)}


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["people", "programs"])
def test_nothing_but_the_answer_is_printed(options):
    """LMCache and vLLM log as they are imported, in colours; a pipe gets none of it.

    The rows differ at 80 columns, too: no name is cut.
    """
    done = subprocess.run(
        [sys.executable, "-c", "from lmcache_xpu.cli import app; app()", "status", *options],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
    )
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    if options:
        assert json.loads(done.stdout)["lmcache_version"]
    else:
        rows = [line for line in done.stdout.splitlines() if line.strip()]
        assert len(set(rows)) == len(rows) - 2  # both devices have the same two classes
        assert "…" not in done.stdout
