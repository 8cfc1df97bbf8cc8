"""`lmcache-xpu doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmcache_xpu.cli.progress import working

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def doctor(
    build: Annotated[
        bool, typer.Option("--build", help="Only what an image can be checked for as it is built.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, or its name on a hub.", envvar="LMCACHE_XPU_MODEL"),
    ] = None,
) -> None:
    """Check this machine for an engine with the settings in the environment; explain.

    Exits with 1 when a check fails, with 0 otherwise.
    """
    if not as_json:  # at once: the checks take seconds, most of them the import of vLLM
        typer.echo("This machine, as it is built:" if build else "This machine, for an engine:")
    with working("Checking this machine") as show:
        from lmcache_xpu.doctor import NO_MODEL, Machine, examine, examine_build
        from lmcache_xpu.launch.serve import METRICS_VARIABLE
        from lmcache_xpu.launch.settings import Settings

        # In a container it names a directory that the engine makes as it starts; there is none
        # yet, and what is imported here would write to it.
        os.environ.pop(METRICS_VARIABLE, None)
        machine, checks = Machine(), []
        settings = None if build else Settings.load({"model": model or NO_MODEL})
        for check in examine_build(machine) if settings is None else examine(settings, machine):
            checks.append(check)
            show(f"Checking this machine; {len(checks)} checks done")
    failed = any(check.outcome == "fail" for check in checks)
    if as_json:
        report = {"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}
        typer.echo(json.dumps(report, indent=2))
    else:
        table = Table(box=None, show_header=False)
        for check in checks:
            style = _STYLES[check.outcome]
            text = escape(check.found)
            if check.advice:
                text += f"\n[italic]{escape(check.advice)}[/italic]"
            table.add_row(f"[{style}]{check.outcome}[/{style}]", check.name, text)
        Console(highlight=False).print(table)
    raise typer.Exit(1 if failed else 0)
