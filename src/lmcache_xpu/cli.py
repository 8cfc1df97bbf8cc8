"""The `lmcache-xpu` command.

The options of `serve` are made from the fields of `Settings`: their names, types, defaults
and help exist once.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import signal
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from lmcache_xpu import __version__
from lmcache_xpu.errors import LMCacheXPUError
from lmcache_xpu.settings import ENV_PREFIX, Settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["app"]


class _Group(TyperGroup):
    """Our own errors end in one red line and exit code 2; anything else is a bug's traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LMCacheXPUError as error:
            Console(stderr=True, soft_wrap=True).print(
                f"lmcache-xpu: {error}", style="red", markup=False, highlight=False
            )
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    help="vLLM with LMCache on Intel GPUs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it would print local variables, keys among them
)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The command needs a group, even for options of its own."""


def _serve(values: dict[str, Any], dry_run: bool) -> None:
    from lmcache_xpu.serve import serve

    serve(Settings.load(values), dry_run=dry_run)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """The command-line option of one setting; unset means: the variable, or the default."""
    shown = "unset" if field.default is None else str(field.default)
    help_text = f"{field.description} (default: {shown})."
    kind: Any = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(help=help_text, show_default=False)],
    )


def _serve_command() -> Any:
    """`serve` with one option per setting, model and extra arguments by position."""

    def run(**given: Any) -> None:  # its signature is written below
        dry_run = given.pop("dry_run")
        _serve({k: v for k, v in given.items() if v not in (None, [])}, dry_run)

    keyword_only = inspect.Parameter.KEYWORD_ONLY
    positional = {
        "model": (str, ...),
        "extra_args": (list[str] | None, None),
    }
    parameters = [
        inspect.Parameter(
            name,
            keyword_only,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[
                kind,
                typer.Argument(
                    help=f"{Settings.model_fields[name].description}.", show_default=False
                ),
            ],
        )
        for name, (kind, default) in positional.items()
    ]
    parameters += [
        _option(name, field)
        for name, field in Settings.model_fields.items()
        # A key on the command line can be read by every user of the machine.
        if name not in positional and SecretStr not in get_args(field.annotation)
    ]
    parameters.append(
        inspect.Parameter(
            "dry_run",
            keyword_only,
            default=False,
            annotation=Annotated[
                bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")
            ],
        )
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = f"""Serve MODEL with vLLM and LMCache.

    Arguments after -- go to vLLM. Each option is also an environment variable: --cpu-gib is
    {ENV_PREFIX}CPU_GIB. The API key is {ENV_PREFIX}API_KEY and not an option.
    """
    return run


app.command("serve")(_serve_command())


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file, too.")
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Directory for the model, the logs and the disk tier.")
    ] = Path(".demo"),
    port: Annotated[int | None, typer.Option(help="Port of the engine (default: any).")] = None,
) -> None:
    """Time conversations on this machine: recompute, prefix cache, CPU tier, disk tier."""
    from lmcache_xpu.demo.story import tell

    # Ending by SIGTERM would skip what stops the engine.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    tell(json_file, work=work, port=port)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show which of our parts vLLM and LMCache will use here."""
    from lmcache_xpu.seam import status as seam_status

    found = seam_status()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    table = Table(show_header=False, box=None)
    for name in ("lmcache", "vllm", "torch"):
        table.add_row(name, getattr(found, f"{name}_version") or "not installed")
    table.add_row("versions", "tested" if found.tested else "not a tested combination")
    for device, (standard, layerwise) in found.devices.items():
        table.add_row(f"connector on {device}", standard)
        table.add_row(f"layerwise on {device}", layerwise)
    for name, in_place in found.patches.items():
        table.add_row(name, "in place" if in_place else "[red]missing[/red]")
    Console().print(table)
