"""`lmcache-xpu doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from lmcache_xpu.cli.progress import count, working

if TYPE_CHECKING:
    from lmcache_xpu.doctor import Check

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
    done: list[Check] = []
    with working("Checking it") as console:
        from lmcache_xpu.doctor import NO_MODEL, Machine, examine, examine_build
        from lmcache_xpu.launch.serve import METRICS_VARIABLE
        from lmcache_xpu.launch.settings import Settings

        # In a container it names a directory that the engine makes as it starts; there is none
        # yet, and what is imported here would write to it.
        os.environ.pop(METRICS_VARIABLE, None)
        machine = Machine()
        settings = None if build else Settings.load({"model": model or NO_MODEL})
        for check in examine_build(machine) if settings is None else examine(settings, machine):
            done.append(check)
            if not as_json:
                console.print(_row(check))
    failed = [check.name for check in done if check.outcome == "fail"]
    if as_json:
        report = {"ok": not failed, "checks": [dataclasses.asdict(check) for check in done]}
        typer.echo(json.dumps(report, indent=2))
    else:
        warnings = sum(check.outcome == "warn" for check in done)
        typer.echo(f"\n{_conclusion(failed, warnings, model, build=build)}")
    raise typer.Exit(1 if failed else 0)


def _row(check: Check) -> Table:
    """Return a check's lines; the columns are as wide as those of any other check."""
    row = Table(box=None, show_header=False)
    for width in (4, 17, None):
        row.add_column(width=width)
    style, text = _STYLES[check.outcome], escape(check.found)
    if check.advice:
        text += f"\n[italic]{escape(check.advice)}[/italic]"
    row.add_row(f"[{style}]{check.outcome}[/{style}]", check.name, text)
    return row


def _conclusion(failed: Sequence[str], warnings: int, model: str | None, *, build: bool) -> str:
    """Return the sentence about all checks, and the command that comes next."""
    also = f", {count(warnings, 'warning')}. Next:"
    if failed:
        checks = f"{count(len(failed), 'check')} failed ({', '.join(failed)})"
        return f"Not ready: {checks}{also} follow the advice, then lmcache-xpu doctor again"
    start = f"lmcache-xpu serve {model or 'MODEL'}"
    after = "lmcache-xpu doctor, where the engine will run" if build else start
    return f"Ready: no check failed{also} {after}"
