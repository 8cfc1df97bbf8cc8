"""The `lmcache-xpu` command; each sub-command is a file."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from lmcache_xpu import __version__
from lmcache_xpu.cli import bench, demo, doctor, serve, size, status
from lmcache_xpu.errors import LMCacheXPUError

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


app.command("serve")(serve.make_command())
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("size")(size.size)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
