"""`lmcache-xpu size`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lmcache_xpu.cli.progress import count
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.fields import ENV_PREFIX, Cache, TierDtype
from lmcache_xpu.launch.model_support import weights_bytes
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.launch.sizing import (
    AGENT_COMPUTE,
    AGENT_TOKENS,
    GIB,
    Fit,
    KVShape,
    fit,
)

_DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


def _setting(name: str, text: str, *, least: float | None = None) -> Any:
    variable = ENV_PREFIX + name.upper()
    return typer.Option(help=text, envvar=variable, show_envvar=True, min=least)


_CACHE = _setting("cache", "Where the cache lives: auto, in-process, server or vllm.")
_DTYPE = _setting("dtype", "Type of the model, which is the KV cache's where that is auto.")
_KV_CACHE = _setting("kv_cache_gib", "The engine's own KV cache per device, GiB.", least=0)
_FRACTION = _setting("memory_fraction", "Part of a GPU's memory that the engine may use.", least=0)
_TIER_DTYPE = _setting("tier_dtype", "Type of keys and values in the tiers: auto or fp8.")
_CPU = _setting("cpu_gib", "CPU tier per device, GiB.", least=0)
_DISK = _setting("disk_gib", "Disk tier per device, GiB.", least=0)
_CHUNK = _setting("chunk_tokens", "Tokens per stored chunk.", least=1)
_TENSOR = _setting("tensor_parallel", "Devices that share each layer.", least=1)
_PIPELINE = _setting(
    "pipeline_parallel", "Groups of devices that have some of the layers each.", least=1
)
_DATA = _setting("data_parallel", "Engines that share the requests.", least=1)


def size(
    model: Annotated[str, typer.Argument(help="Model directory, config.json, or name on a hub.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one user's history (default: 8192).")
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Users whose histories are to be kept (default: 1).")
    ] = None,
    agents: Annotated[
        int | None,
        typer.Option(min=1, help=f"Coding agents at work, instead: {AGENT_TOKENS:,} tokens each."),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=0, help="Memory of each GPU, GiB: whether the model fits, and what is left."
        ),
    ] = None,
    memory_fraction: Annotated[float, _FRACTION] = _DEFAULTS["memory_fraction"],
    kv_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache: auto, bfloat16, float16, float32 or fp8.")
    ] = "auto",
    dtype: Annotated[str, _DTYPE] = "auto",
    tier_dtype: Annotated[TierDtype, _TIER_DTYPE] = "auto",
    cache: Annotated[Cache, _CACHE] = "auto",
    kv_cache_gib: Annotated[float | None, _KV_CACHE] = None,
    cpu_gib: Annotated[float, _CPU] = _DEFAULTS["cpu_gib"],
    disk_gib: Annotated[float | None, _DISK] = None,
    chunk_tokens: Annotated[int, _CHUNK] = _DEFAULTS["chunk_tokens"],
    tensor_parallel: Annotated[int, _TENSOR] = 1,
    pipeline_parallel: Annotated[int, _PIPELINE] = 1,
    data_parallel: Annotated[int, _DATA] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """How many users' histories each tier holds, from a model's configuration.

    Sizes are per device, as the settings of `serve` are. Options not given are read from the
    variables of `serve`. Needs neither vLLM nor a GPU.
    """
    if agents is not None and (users is not None or context is not None):
        raise SettingsError(
            "--agents with --users or --context",
            "one of the two: agents have histories of their own",
        )
    ranks = tensor_parallel * pipeline_parallel
    shape = KVShape.of_model(
        model,
        kv_dtype=kv_dtype,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        tier_dtype=tier_dtype,
        server=cache == "server" or (cache == "auto" and ranks > 1),
    )
    weights = weights_bytes(model) if gpu_gib is not None else None
    room = None
    if gpu_gib is not None and weights is not None:
        # The most: the engine measures what computing and graphs take of it. Below 0: too large.
        room = gpu_gib * memory_fraction - weights / ranks / GIB
    own_gib = kv_cache_gib if kv_cache_gib is not None or room is None else max(room, 0.0)
    result = fit(
        shape,
        context_tokens=context or (AGENT_TOKENS if agents else 8192),
        users=agents or users or 1,
        chunk_tokens=chunk_tokens,
        tiers_gib={"engine": own_gib, "CPU": cpu_gib, "disk": disk_gib or None},
        devices=ranks * data_parallel,
        agents=agents is not None,
    )
    if as_json:
        fits = {"weights_bytes": weights, "fits_gpu": None if room is None else room > 0}
        typer.echo(json.dumps(dataclasses.asdict(result) | fits, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{shape}: {result.token_bytes:,} bytes per token and device")
    whose = count(agents, "agent") if agents else count(users or 1, "user")
    console.print(
        f"{result.history_tokens:,} tokens in whole chunks: {result.history_bytes / GIB:.2f} GiB "
        f"per {'agent' if agents else 'user'}, {result.needed_gib:.2f} GiB for {whose}"
    )
    for note in shape.notes:
        console.print(f"{note[0].upper()}{note[1:]}.")
    if gpu_gib is not None:
        console.print(_gpu_line(gpu_gib * memory_fraction, weights, ranks, room))
    console.print(_table(result, agents=agents is not None))
    sizes = ", ".join(f"{name} {gib:g} GiB" for name, gib in result.machine_gib.items())
    console.print(f"of the machine, for {count(ranks * data_parallel, 'device')}: {sizes}")


def _gpu_line(usable_gib: float, weights: int | None, ranks: int, room: float | None) -> str:
    if weights is None or room is None:
        return "The weights are not at hand: name the model's directory to see whether it fits."
    each = f"weights of {weights / ranks / GIB:.1f} GiB on each GPU, of which {usable_gib:.1f} GiB"
    if room <= 0:
        return f"[red]Does not fit:[/red] {each} may be used."
    return (
        f"Fits: {each} may be used. At most {room:.1f} GiB are left for the engine's own cache, "
        "less what its computing takes."
    )


def _table(result: Fit, *, agents: bool) -> Table:
    columns = ["tier", "GiB", "tokens", "agents" if agents else "users' histories", "enough"]
    table = Table(*columns, *(["computed, x endless cache"] if agents else []), box=None)
    for name, tier in result.tiers.items():
        row = [f"{tier.gib:.4g}", f"{tier.tokens:,}", f"{tier.histories:,}"]
        row.append("yes" if tier.enough else "[red]no[/red]")
        if agents:
            row.append(
                f"more than {max(AGENT_COMPUTE.values())}"
                if tier.compute is None
                else f"up to {tier.compute}"
            )
        table.add_row(name, *row)
    return table
