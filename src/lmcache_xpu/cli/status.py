"""`lmcache-xpu status`."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmcache_xpu import versions
from lmcache_xpu.cli.progress import working
from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from lmcache_xpu.harness.cache_use import CacheUse
    from lmcache_xpu.vllm_hooks.patches import Status

GIB = 2**30


def status(
    url: Annotated[
        str | None,
        typer.Option(help="A running engine: say whether its cache works, and what to change."),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(min=1, max=86_400, help="With --url: watch for so many seconds."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show what an engine that starts here will use; with --url, how a running one does.

    A key for the running engine is read from LMCACHE_XPU_API_KEY. Exits with 1 when something has
    to be corrected, with 2 when nobody answers there.
    """
    if url is not None:
        _show_running(url, since, as_json)
        return
    if since is not None:
        raise SettingsError("--since without --url", "a running engine's --url beside it")
    console = Console(highlight=False, soft_wrap=True)
    if not as_json:
        software = versions.installed()
        console.print("Installed here")
        for name in ("lmcache", "vllm", "torch"):
            console.print(f"  {name:<12}{getattr(software, name) or 'not installed'}")
        tested = "tested together" if software.tested else "[red]not a tested combination[/red]"
        console.print(f"  {'versions':<12}{tested}")
    with working("Importing vLLM, to see what it will use"):
        from lmcache_xpu.vllm_hooks.patches import status as read_status

        state = read_status()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state), indent=2))
    else:
        _show_connectors(console, state)


def _show_running(url: str, since: int | None, as_json: bool) -> None:
    # A directory of this shell's engine: what is imported here would write to it.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    from lmcache_xpu.harness.cache_use import CacheUse, advise
    from lmcache_xpu.harness.client import Client

    key = os.environ.get("LMCACHE_XPU_API_KEY")
    with (
        working(f"Asking {url}" + (f", for {since} s" if since else "")),
        Client(url, api_key=key, timeout_s=10, trust_env=True) as server,
    ):
        earlier, page = None, server.page()
        if not page.has("lmcache_xpu_"):
            raise SettingsError(
                f"{server.url}, a vLLM whose /metrics has nothing of lmcache-xpu",
                "an engine with offload on",
                "Start it with `lmcache-xpu serve`, which also sets PROMETHEUS_MULTIPROC_DIR.",
            )
        if since is not None:
            time.sleep(since)
            earlier, page = page, server.page()
        models = server.models()
    use = CacheUse.between(earlier, page)
    advice = advise(use)
    ok = all(item.outcome != "wrong" for item in advice)
    if as_json:
        answer = {"ok": ok, "url": server.url, "models": models, "since_s": since}
        parts = {"use": dataclasses.asdict(use), "advice": [*map(dataclasses.asdict, advice)]}
        typer.echo(json.dumps(answer | parts, indent=2))
    else:
        names = ", ".join(models) or "models that this key may not see (LMCACHE_XPU_API_KEY)"
        span = "since it started" if since is None else f"in {since} seconds"
        console = Console(highlight=False, markup=False)
        console.print(f"{server.url} serves {names}; {span}:\n", soft_wrap=True)
        console.print(_use_table(use))
        for item in advice:
            style = {"ok": "", "hint": "yellow", "wrong": "bold red"}[item.outcome]
            console.print(f"\n{item.text}", style=style)
    raise typer.Exit(0 if ok else 1)


def _use_table(use: CacheUse) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    tiers = ("cpu", "CPU tier"), ("disk", "disk tier"), ("shared", "shared tier")
    places = ("device", "engine's own cache"), *tiers, ("computed", "computed")
    table.add_row("prompt tokens", f"{use.prompt_tokens:,.0f}")
    for place, name in places:
        tokens = getattr(use, f"{place}_tokens")
        table.add_row(f"  {name}", f"{tokens:,.0f}", f"{use.share(tokens):.0%}")
    table.add_row("stored tokens")
    for tier, name in tiers:
        table.add_row(f"  {name}", f"{use.stored_tokens[tier]:,.0f}")
    table.add_row("chunks evicted from the CPU tier", f"{use.evicted_chunks:,.0f}")
    table.add_row("failed moves", f"{sum(use.failures.values()):,}")
    table.add_row("now")
    if use.own_tokens:
        table.add_row("  engine's own cache, tokens", f"{use.own_tokens:,.0f}")
    table.add_row("  in use by requests", f"{use.own_usage:.0%}")
    for tier, name in tiers[:2]:
        held, limit = getattr(use, f"{tier}_bytes"), getattr(use, f"{tier}_limit_bytes")
        if limit:
            table.add_row(f"  {name}, GiB", f"{held / GIB:.2f}", f"{held / limit:.0%} full")
    table.add_row("  requests, and waiting", f"{use.running:,.0f} + {use.waiting:,.0f}")
    return table


def _show_connectors(console: Console, state: Status) -> None:
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
