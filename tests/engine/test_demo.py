"""The demo as `make demo` runs it, and then what its last lines tell a reader to do."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.scripts import environment

from lmcache_xpu.harness.client import Client
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.launch.settings import Settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.tools,
    pytest.mark.timeout(900),
]  # three engines, one after the other


def test_the_engine_that_is_started_by_hand_finds_what_the_demo_stored(tmp_path, monkeypatch):
    program = Path(sys.executable).with_name("lmcache-xpu")
    done = subprocess.run(
        [program, "demo"],
        cwd=tmp_path,
        env=environment(COLUMNS="80"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    serve, ask = (shlex.split(line) for line in done.stdout.splitlines() if line.startswith("    "))
    answer = (tmp_path / ".demo/answer.txt").read_text()

    monkeypatch.chdir(tmp_path)
    settings = Settings.load({"model": "as printed", "port": free_port()})
    argv = [*serve, "--port", str(settings.port)]
    with EngineProcess(settings, tmp_path / "by-hand.log", argv=argv) as engine:
        [url] = (word for word in ask if word.startswith("http"))
        reply = httpx.post(
            url.replace(":8000/", f":{settings.port}/"),
            content=Path(ask[-1].removeprefix("@")).read_bytes(),
            headers={"Content-Type": "application/json"},
            timeout=60,
            trust_env=False,
        ).json()
        with Client(engine.url) as client:
            counts = client.counts()
    assert reply["choices"][0]["message"]["content"] == answer
    assert counts.external_hits > 0.9 * counts.prompt
