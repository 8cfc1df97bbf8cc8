"""`lmcache-xpu report` and `lmcache-xpu demo`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmcache_xpu.cli.bench import TimeoutS, exit_on_sigterm
from lmcache_xpu.errors import SettingsError


def report(
    path: Annotated[Path, typer.Argument(help="The file to write; it must not exist yet.")] = Path(
        "lmcache-xpu-report.md"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer requests, each once: a few minutes.")
    ] = False,
    timeout_s: TimeoutS = 900,
) -> None:
    """Check and measure this machine; write one file to send to this project.

    Runs doctor and verify, and times hits. Nothing is downloaded or sent. Values, paths and
    addresses that are not listed as harmless are hidden. The file is written after each part, so an
    interrupted report is one, too. Exits with 1 when a part fails.
    """
    from lmcache_xpu.bench.machine_report import MachineReport, parts
    from lmcache_xpu.bench.redaction import Redactor
    from lmcache_xpu.launch.preflight import check_file

    exit_on_sigterm()
    if path.exists():
        raise SettingsError(f"{path}, which exists", "a new file", "Name another, or remove it.")
    check_file(path, "PATH")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    command = f"lmcache-xpu report{' --quick' if quick else ''}"
    with tempfile.TemporaryDirectory() as directory:
        document = MachineReport(path, command, Redactor.of_this_machine(), Path(directory))
        programs = parts(Path(directory), quick=quick, timeout_s=timeout_s)
        console.print(
            f"Writing {path}; {len(programs)} parts, of which the last two start engines."
        )
        well = document.run(programs, console)
    console.print(f"Read {path}, then attach it to an issue: docs/guides/send-a-report.md")
    raise typer.Exit(0 if well else 1)


def demo(
    work: Annotated[
        Path, typer.Option(help="Directory for the model, the logs and the disk tier.")
    ] = Path(".demo"),
    port: Annotated[int | None, typer.Option(help="Port of the engine (default: any).")] = None,
) -> None:
    """Time conversations on this machine: recompute, prefix cache, CPU tier, disk tier."""
    from lmcache_xpu.harness.demo import tell

    exit_on_sigterm()
    tell(work=work, port=port)
