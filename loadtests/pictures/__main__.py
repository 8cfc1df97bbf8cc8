"""Renew the pictures of docs/: `python -m loadtests.pictures`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lmcache_xpu.errors import EngineError, LMCacheXPUError
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import DEMO, make_model
from lmcache_xpu.launch.preflight import check_directory
from loadtests.compare_options import REFUSED
from loadtests.facts import facts_of
from loadtests.pictures.dashboard import read_dashboard
from loadtests.pictures.drawing import DPI, draw_dashboard
from loadtests.pictures.prometheus import SCRAPE_S, Prometheus, find_program
from loadtests.pictures.recording import Recording
from loadtests.summary_picture import NAME, draw_summary
from loadtests.variants import PROFILES, Variant, settings_of

__all__ = ["DASHBOARD", "RECORDING", "REPORT", "SUMMARY"]

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs/pictures/dashboard.png"
RECORDING = ROOT / "docs/pictures/dashboard.json"
REPORT = ROOT / "docs/results/loadtest/summary.json"
SUMMARY = REPORT.with_name(NAME)

PROFILE = PROFILES["long"]
# A CPU tier that holds a part of the histories, so that the disk tier has work.
TIERS = Variant(name="pictures", about="CPU and disk tier", settings={"cpu_gib": 0.15})
LOAD = {
    "--tags": "multi-round",
    "--users": PROFILE.users,
    "--qps": 0.6,  # more than the engine computes, less than it loads
    "--num-rounds": PROFILE.rounds,
    "--shared-system-prompt": PROFILE.shared_words,
    "--user-history-prompt": PROFILE.history_words,
    "--answer-len": PROFILE.answer_tokens,
}


def record(program: str, *, work: Path, load_s: float, facts: dict[str, Any]) -> Recording:
    """Put a load on an engine on CPU, and ask Prometheus what the dashboard asks.

    Args:
        program: the path of Prometheus.
        work: for the model and the logs.
        load_s: seconds of load.
        facts: machine, versions and command.
    """
    with tempfile.TemporaryDirectory(prefix="pictures-", dir=work) as name:
        folder = Path(name).resolve()
        model = make_model(DEMO, work.resolve() / "models")
        settings = settings_of(TIERS, PROFILE, model=model, disk=folder / "disk", port=free_port())
        with EngineProcess(settings, work / "pictures-engine.log") as engine:
            address = engine.url.partition("//")[2]
            with Prometheus.watching(address, program=program, folder=folder) as prometheus:
                time.sleep(2 * SCRAPE_S)  # a rate needs a value before the load
                start = time.time()
                _load(engine.url, folder / "report", load_s, work / "pictures-load.log")
                panels, end = read_dashboard(), start + load_s
                return Recording.ask(prometheus, panels, start=start, end=end, facts=facts)


def _load(url: str, directory: Path, load_s: float, log: Path) -> None:
    options = {**LOAD, "--host": url, "--duration-s": load_s, "--report-dir": directory}
    words = [str(word) for pair in options.items() for word in pair]
    start = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    with log.open("w") as file:
        command = [*start, "--only-summary", "--canned", *words]
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode
    if code not in (0, 1):
        raise EngineError(f"the load test ended with exit code {code}", "a load", f"Read {log}.")


def main(
    prometheus: Annotated[str, typer.Option(help="The program: a name, or a path")] = "prometheus",
    again: Annotated[
        bool, typer.Option("--again", help="Draw what was recorded; start nothing")
    ] = False,
    load_s: Annotated[float, typer.Option(min=60, help="Seconds of load")] = 240,
    work: Annotated[Path, typer.Option(help="Model, logs and disk tier")] = Path(".demo"),
) -> None:
    """Draw the dashboard of an engine under load, and the load report's image from its figures."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        if again:
            recording = Recording.read(RECORDING)
        else:
            program = find_program(prometheus)
            check_directory(work, "--work")
            console.print(
                f"An engine on CPU, then {load_s:g} s of load; logs: {work}/pictures-*.log"
            )
            recording = record(
                program,
                work=work,
                load_s=load_s,
                facts=facts_of(["python", "-m", "loadtests.pictures"]),
            )
            recording.write(RECORDING)
    except (LMCacheXPUError, ValueError, OSError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from error
    figure = draw_dashboard(read_dashboard(), recording)
    figure.savefig(DASHBOARD, dpi=DPI, pil_kwargs={"optimize": True})
    console.print(f"Drawn: {DASHBOARD.relative_to(ROOT)}")
    summary = json.loads(REPORT.read_text())
    if "answers" not in summary:  # a report of before 2026-11-23
        print(f"pictures: {REPORT} is old; `make loadtest-compare` makes one", file=sys.stderr)
        raise typer.Exit(REFUSED)
    draw_summary(summary, SUMMARY.parent)
    console.print(f"Drawn: {SUMMARY.relative_to(ROOT)}")


if __name__ == "__main__":
    typer.run(main)
