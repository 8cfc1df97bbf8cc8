"""The `lmcache-xpu` command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lmcache_xpu import __version__
from lmcache_xpu.cli import bench, doctor, report, serve, size, status, verify
from lmcache_xpu.errors import LMCacheXPUError, SettingsError


class _Group(TyperGroup):
    """Our own errors, missing packages and Ctrl-C end in one red line and exit code 2 or 130.

    Anything else is a bug's traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as missing:
            name = str(missing.name).partition(".")[0]
            if name == "lmcache_xpu":
                raise
            error: BaseException = SettingsError(
                f"no {name} in this Python environment ({sys.prefix})",
                "vLLM and LMCache, which this command needs",
                "Where vLLM is, `python3 scripts/install.py` adds the rest; `size` needs neither.",
            )
        except (LMCacheXPUError, KeyboardInterrupt) as raised:
            error = raised
        except Exception as wrong:
            if isinstance(message := getattr(wrong, "message", None), str):  # typer's, of an option
                wrong.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]
            raise
        typer.secho(f"lmcache-xpu: {str(error) or 'interrupted'}", fg="red", err=True)
        raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 2) from error


app = typer.Typer(
    cls=_Group,
    help="KV-cache offload for vLLM on Intel GPUs.",
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
for _name, _command, _help in (
    ("serve", serve.make_command(), "Serve a model, with its KV cache offloaded."),
    ("doctor", doctor.doctor, "Check this machine before an engine is started."),
    ("status", status.status, "Say what is installed, or whether a server's cache works."),
    ("size", size.size, "Say how many users' histories each tier holds."),
    ("demo", report.demo, "Time conversations on CPU, with and without the tiers."),
    ("verify", verify.verify, "Compare what a KV connector loads, byte by byte."),
    ("report", report.report, "Check and measure this machine: one file to send."),
):
    app.command(_name, short_help=_help)(_command)
app.add_typer(bench.app, name="bench", short_help="Time hits and stores on this machine.")
