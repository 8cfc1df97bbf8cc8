"""`lmcache-xpu size`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmcache_xpu.cli.progress import count
from lmcache_xpu.launch.fields import ENV_PREFIX, Cache
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.launch.sizing import GIB, Fit, KVShape, fit

_DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


def _setting(name: str, text: str, *, least: float | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        help=text, envvar=ENV_PREFIX + name.upper(), show_envvar=True, min=least
    )
    return option


_CACHE = _setting("cache", "Where LMCache runs: auto, in-process, or server.")
_DTYPE = _setting("dtype", "Type of the model, which is the KV cache's where that is auto.")
_KV_CACHE = _setting("kv_cache_gib", "The engine's own KV cache per device, GiB.", least=0)
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
    context: Annotated[int, typer.Option(min=1, help="Tokens of one user's history.")] = 8192,
    users: Annotated[int, typer.Option(min=1, help="Users whose histories are to be kept.")] = 1,
    kv_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache: auto, bfloat16, float16, float32 or fp8.")
    ] = "auto",
    dtype: Annotated[str, _DTYPE] = "auto",
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
    ranks = tensor_parallel * pipeline_parallel
    shape = KVShape.of_model(
        model,
        kv_dtype=kv_dtype,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        server=cache == "server" or (cache == "auto" and ranks > 1),
    )
    result = fit(
        shape,
        context_tokens=context,
        users=users,
        chunk_tokens=chunk_tokens,
        tiers_gib={"engine": kv_cache_gib, "CPU": cpu_gib, "disk": disk_gib or None},
        devices=ranks * data_parallel,
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{shape}: {result.token_bytes:,} bytes per token and device")
    console.print(
        f"{result.history_tokens:,} tokens in whole chunks: {result.history_bytes / GIB:.2f} GiB "
        f"per user, {result.needed_gib:.2f} GiB for {count(users, 'user')}"
    )
    for note in shape.notes:
        console.print(f"{note[0].upper()}{note[1:]}.")
    console.print(_table(result))
    sizes = ", ".join(f"{name} {gib:g} GiB" for name, gib in result.machine_gib.items())
    console.print(f"of the machine, for {count(ranks * data_parallel, 'device')}: {sizes}")


def _table(result: Fit) -> Table:
    table = Table("tier", "GiB", "tokens", "users' histories", "enough", box=None)
    for name, tier in result.tiers.items():
        enough = "yes" if tier.enough else "[red]no[/red]"
        table.add_row(name, f"{tier.gib:.4g}", f"{tier.tokens:,}", f"{tier.histories:,}", enough)
    return table
