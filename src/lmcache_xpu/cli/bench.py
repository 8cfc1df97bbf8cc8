"""`lmcache-xpu bench`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from lmcache_xpu.bench.runner import Result

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)

ENGINE = """Time hits and stores in a real engine with random weights; nothing is downloaded.

Compares vLLM without a connector (none), with this package (ours), with LMCache's own
connectors (lmcache) and with vLLM's OffloadingConnector (offloading). An engine that does not
start, or restores other bytes than recomputing wrote, is shown as such. Exits with 1 if it is
one with this package."""
LOAD = """Time four loads in a real engine with random weights; nothing is downloaded.

What hits cost others: requests decode, alone and then while prompts with cached tokens arrive
(decoding), of which all but one token may be cached (copying). What storing costs them: the
same with new prompts (storing). What is gained: conversations at once, more than the engine's
own cache holds (conversations).

`room` is an engine whose own cache holds everything. Exits with 1 if an engine with this
package fails."""

SHAPES = "8b, for GPUs of 32 GiB and more, 1b or small (default: small on CPU, else 1b)."
VARIANTS = """none, ours, ours-layerwise, ours-server, lmcache, lmcache-layerwise, lmcache-server,
offloading or, of loads, room; may be given several times (default: all)."""
ONLY = """The prompts of a table, '61440 + 4096' say, or a load: decoding, copying, storing or
conversations; may be given several times (default: all)."""
REPEATS = "Of each request or load; medians count (default: 3 of requests, 1 of loads)."
DEVICES = "Devices that share the layers, in each engine; they share its memory, too."
IN_TURN = """All engines at once, asked in turn: a host that changes its speed does so for all of
them. They share the devices out; these need memory for all."""
GRAPHS = "With vLLM's compiled graphs: minutes longer."

Names = list[str] | None
TimeoutS = Annotated[int, typer.Option(min=1, help="Seconds until an engine starts or answers.")]


@app.command("engine", help=ENGINE)
@app.command("load", help=LOAD)
def measure(
    context: typer.Context,
    shape: Annotated[str | None, typer.Option(help=SHAPES)] = None,
    variant: Annotated[Names, typer.Option(help=VARIANTS)] = None,
    only: Annotated[Names, typer.Option("--row", "--load", help=ONLY)] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help=REPEATS)] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help=DEVICES)] = 1,
    in_turn: Annotated[bool, typer.Option("--in-turn", help=IN_TURN)] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help=GRAPHS)] = False,
    timeout_s: TimeoutS = 900,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Measure, show the figures, and write them after each row.

    Raises:
        SettingsError: there is nothing of a name, or the file can't be written.
    """
    from lmcache_xpu.bench import runner
    from lmcache_xpu.bench.report import Report
    from lmcache_xpu.bench.shapes import chosen, default_name, shape_named
    from lmcache_xpu.bench.variants import variants_named
    from lmcache_xpu.launch.preflight import check_file

    if json_file is not None:
        check_file(json_file, "--json")
    model = shape_named(shape or default_name())
    is_load = context.info_name == "load"
    model = (model.under_load() if is_load else model).on_devices(tensor_parallel)
    requests = chosen("load" if is_load else "row", model.requests, only or ())
    engines = variants_named(model, variant or ())
    exit_on_sigterm()
    facts = {"machine": runner.machine(), "command": shlex.join(["lmcache-xpu", *sys.argv[1:]])}

    def write(results: list[Result]) -> None:
        if json_file is not None:
            page = facts | Report(model, results).as_dict()
            json_file.write_text(json.dumps(page, indent=1) + "\n")

    def save(results: list[Result]) -> None:
        with suppress(OSError):  # it is told in the end, when all is measured
            write(results)

    console = Console()
    results = runner.run(
        model,
        engines,
        {name: request.measure for name, request in requests.items()},
        repeats=repeats or (1 if is_load else 3),
        in_turn=in_turn,
        graphs=graphs,
        timeout_s=timeout_s,
        console=console,
        save=save,
    )
    Report(model, results).show(console)
    try:
        write(results)
    except OSError as error:
        raise SettingsError(
            f"--json {json_file} ({error})", "a file that can be written"
        ) from error
    ours = [result for result in results if result.variant.startswith("ours")]
    if any(result.error or not (is_load or result.exact == 1) for result in ours):
        raise typer.Exit(1)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit: ended by it, this process would leave engines behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
