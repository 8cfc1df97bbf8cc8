"""`lmcache-xpu status`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show which of our parts vLLM and LMCache will use here."""
    from lmcache_xpu.kv_connector.patches import status as read_status

    state = read_status()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state), indent=2))
        return
    table = Table(show_header=False, box=None)
    for name in ("lmcache", "vllm", "torch"):
        table.add_row(name, getattr(state, f"{name}_version") or "not installed")
    table.add_row("versions", "tested" if state.tested else "not a tested combination")
    for device, (standard, layerwise) in state.devices.items():
        table.add_row(f"connector on {device}", standard)
        table.add_row(f"layerwise on {device}", layerwise)
    for name, in_place in state.patches.items():
        table.add_row(name, "in place" if in_place else "[red]missing[/red]")
    Console().print(table)
