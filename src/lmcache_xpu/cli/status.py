"""`lmcache-xpu status`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lmcache_xpu import versions
from lmcache_xpu.cli.progress import working

if TYPE_CHECKING:
    from lmcache_xpu.kv_connector.patches import Status


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show what an engine that starts here will use."""
    console = Console(highlight=False, soft_wrap=True)
    if not as_json:
        _show_versions(console, versions.installed())
    with working("Importing vLLM, to see what it will use"):
        from lmcache_xpu.kv_connector.patches import status as read_status

        state = read_status()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state), indent=2))
    else:
        _show_connectors(console, state)


def _show_versions(console: Console, software: versions.Versions) -> None:
    console.print("Installed here")
    for name in ("lmcache", "vllm", "torch"):
        console.print(f"  {name:<12}{getattr(software, name) or 'not installed'}")
    tested = "tested together" if software.tested else "[red]not a tested combination[/red]"
    console.print(f"  {'versions':<12}{tested}")


def _show_connectors(console: Console, state: Status) -> None:
    """Print a line for each class and each replaced attribute; lines are never folded."""
    console.print("\nAn engine that starts here uses")
    for device, (standard, layerwise) in state.devices.items():
        console.print(f"  on {device}")
        console.print(f"    standard   {standard}", markup=False)
        console.print(f"    layerwise  {layerwise}", markup=False)
    console.print(
        "  attributes of vLLM that it replaces" if state.patches else "  nothing of this package"
    )
    for name, in_place in state.patches.items():
        mark = "in place" if in_place else "[red]missing[/red] "
        console.print(f"    {mark}  {escape(name)}")
    console.print("\nAn engine that runs: lmcache-xpu status --url http://127.0.0.1:8000")
