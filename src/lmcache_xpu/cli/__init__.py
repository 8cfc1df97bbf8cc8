"""The `lmcache-xpu` command."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from lmcache_xpu import __version__
from lmcache_xpu.cli import bench, doctor, report, serve, size, status
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
    help="KV-cache offload for vLLM on Intel GPUs.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut names of options at 80 columns, and keep line breaks
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


# The list of commands has one line for each; what does not fit is cut.
app.command("serve", short_help="Serve a model, with its KV cache offloaded.")(serve.make_command())
app.command("doctor", short_help="Check this machine before an engine is started.")(doctor.doctor)
app.command("status", short_help="Say what is installed, or whether a server's cache works.")(
    status.status
)
app.command("size", short_help="Say how many users' histories each tier holds.")(size.size)
app.command("demo", short_help="Time conversations on CPU, with and without the tiers.")(
    report.demo
)
app.add_typer(bench.app, name="bench", short_help="Time hits and stores on this machine.")
app.command("report", short_help="Check and measure this machine: one file to send.")(report.report)
