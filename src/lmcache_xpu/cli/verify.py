"""`lmcache-xpu verify`."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lmcache_xpu.cli.bench import JsonFile, TimeoutS, exit_on_sigterm
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.launch.fields import CPU_BLOCK_TOKENS, ENV_PREFIX

if TYPE_CHECKING:
    from lmcache_xpu.bench.runner import Child
    from lmcache_xpu.verify.judge import Result

CONFIG = "vLLM's own --kv-transfer-config (default: this package's connector, by its settings)."
DISK = """Directory that holds what is stored: the engine is restarted, and a byte of each file is
flipped. Of this package's connector it becomes the disk tier. Name an empty one."""
RESTART = "Ask a second engine for what the first one stored; --disk does so too."
ACQUIT = """Ask the same prompts without any cache, with vLLM's own, and with the connector: which
of them is the first to differ? For garbage in answers."""
EXTRA = "Arguments of vLLM, behind --."
# Settings that the environment does not name: steps shorter than the prompts, a small KV cache.
SETTINGS: dict[str, Any] = {
    "loads": "always",
    "max_num_batched_tokens": 512,
    "max_model_len": 4096,
    "enforce_eager": True,
    "log_level": "warning",
}
SIZES: dict[bool, dict[str, Any]] = {
    True: {"kv_cache_gib": 0.02, "cpu_gib": 0.5},
    False: {"kv_cache_gib": 1, "cpu_gib": 4},
}


def verify(
    model: Annotated[
        str | None, typer.Argument(help="Model directory (default: a small random model).")
    ] = None,
    extra_args: Annotated[list[str] | None, typer.Argument(help=EXTRA)] = None,
    kv_transfer_config: Annotated[str | None, typer.Option(help=CONFIG)] = None,
    disk: Annotated[Path | None, typer.Option(help=DISK)] = None,
    is_acquittal: Annotated[bool, typer.Option("--acquit", help=ACQUIT)] = False,
    restart: Annotated[bool, typer.Option("--restart", help=RESTART)] = False,
    timeout_s: TimeoutS = 900,
    json_file: JsonFile = None,
) -> None:
    """Say whether a KV connector gives back what was computed, to the byte.

    A real engine stores prompts, its KV cache is zeroed, and they are asked again. Every block that
    was loaded is compared with what was stored, and all blocks and the answer with an engine
    without the connector. Exits with 1 for wrong bytes, and with 3 where nothing was loaded.
    """
    from lmcache_xpu.bench.runner import machine
    from lmcache_xpu.harness.random_model import EXACT, make_model
    from lmcache_xpu.launch.preflight import check_file
    from lmcache_xpu.verify import judge

    if json_file is not None:
        check_file(json_file, "--json")
    config = None if kv_transfer_config is None else _object(kv_transfer_config)
    if disk is not None and disk.exists() and any(disk.iterdir()):
        raise SettingsError(f"--disk {disk}, which holds files", "an empty directory")
    exit_on_sigterm()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as directory:
        if model is None:
            model = str(make_model(EXACT, Path(directory)))
        start = starter(model, config, disk, extra_args or [], timeout_s, console)
        if is_acquittal:
            results = judge.acquit(start)
        else:
            results = judge.verify(start, restart=restart or disk is not None, disk=disk)
    title = "lmcache-xpu, by its settings" if config is None else config["kv_connector"]
    show(results, console, title)
    code = acquittal(results, console) if is_acquittal else conclusion(results, console)
    if json_file is not None:
        page = {
            "connector": title,
            "machine": machine(),
            "exit_code": code,
            "cases": [dataclasses.asdict(r) | {"outcome": r.outcome} for r in results],
        }
        json_file.write_text(json.dumps(page, indent=1) + "\n")
    raise typer.Exit(code)


def starter(
    model: str,
    config: dict[str, Any] | None,
    disk: Path | None,
    extra_args: list[str],
    timeout_s: float,
    console: Console,
) -> Callable[[str], Child]:
    """Return what starts engines: with the connector, without (`plain`), with no cache (`bare`)."""
    from lmcache_xpu.bench.runner import Child
    from lmcache_xpu.bench.variants import Variant
    from lmcache_xpu.launch.model_support import check_layers, with_layers
    from lmcache_xpu.launch.serve import built_for
    from lmcache_xpu.launch.settings import Settings

    device: str = built_for()
    values = SETTINGS | SIZES[device == "cpu"]
    if disk is not None and config is None:
        values |= {"disk_path": str(disk), "disk_gib": 1}
    values = {k: v for k, v in values.items() if ENV_PREFIX + k.upper() not in os.environ}
    words = [*extra_args, "--skip-tokenizer-init"]
    values |= {"model": model, "device": device, "extra_args": words}
    if config is None:  # with what `serve` sets for the model's layers
        settings = Settings.load(values)
        if (kinds := check_layers(settings)) is not None:
            tokens = with_layers(settings, kinds).chunk_tokens
            values["chunk_tokens"] = max(tokens, CPU_BLOCK_TOKENS if device == "cpu" else 1)

    def start(name: str) -> Child:
        variables, chosen = {f"{ENV_PREFIX}DEVICES": device}, dict(values)
        if name != "connector" or config is not None:
            variables, chosen["offload"] = {f"{ENV_PREFIX}STOCK": "1"}, False
        if name == "bare":
            chosen["prefix_caching"] = False
        if name == "connector" and config is not None:
            whole = json.dumps({"kv_role": "kv_both", **config})
            chosen["extra_args"] = [*words, "--kv-transfer-config", whole]
        title = "the engine with it" if name == "connector" else "the engine without a connector"
        variant = Variant(name=name, title=title)
        return Child(variant, chosen, variables, timeout_s=timeout_s, console=console)

    return start


def show(results: list[Result], console: Console, title: str) -> None:
    """Print the page."""
    table = Table("case", "tokens", "loaded", "vLLM's own", "blocks compared", "", box=None)
    for result in results:
        cells = (result.tokens, result.hit, result.own, result.compared)
        table.add_row(result.case, *(f"{cell:,}" for cell in cells), result.outcome)
    console.print(f"{title}: tokens of prompts, and what was loaded of them", table, sep="\n")
    for result in results:
        if result.different:
            more = f", and {len(result.different) - 1} more" if len(result.different) > 1 else ""
            console.print(f"{result.case}: differs first at {result.different[0]}{more}")
        for count, words in ((result.preemptions, "preemptions"), (result.failed, "tokens")):
            if count:
                after = "" if words == "preemptions" else " promised, and computed: loads failed"
                console.print(f"{result.case}: {count:,} {words}{after}")
        if result.note:
            console.print(f"{result.case}: {result.note}")


def conclusion(results: list[Result], console: Console) -> int:
    """Print what all cases come to, and return the exit code."""
    if any(result.different for result in results):
        console.print("WRONG: what was loaded, or what came of it, is not what was computed.")
        return 1
    if not any(result.hit for result in results):
        console.print("NOTHING WAS LOADED, so nothing is proven.")
        return 3
    console.print("Exact: every block that was compared, and every answer.")
    return 0


def acquittal(results: list[Result], console: Console) -> int:
    """Print which engine is the first that differs, and return the exit code."""
    first = next((result.case for result in results if result.different), None)
    hit = results[-1].hit
    if first is None:
        console.print("All agree: what is wrong in an answer is computed so, without any cache.")
        if not hit:
            console.print("But NOTHING WAS LOADED, so nothing is proven of the connector.")
    elif first == results[-1].case:
        console.print("THE CONNECTOR: engines without it agree with each other.")
    else:
        console.print(f"Not the connector: with {first} the same prompt is computed otherwise.")
    return 1 if first == results[-1].case else 0 if hit else 3


def _object(text: str) -> dict[str, Any]:
    """Read a KV transfer configuration."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--kv-transfer-config {text} ({error})", "a JSON object") from None
    if not isinstance(config, dict) or "kv_connector" not in config:
        raise SettingsError(f"--kv-transfer-config {text}", 'an object with "kv_connector"')
    return config
