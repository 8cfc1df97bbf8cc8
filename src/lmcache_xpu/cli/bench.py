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
    from collections.abc import Mapping

    from lmcache_xpu.bench.jobs import Prompts
    from lmcache_xpu.bench.runner import Result
    from lmcache_xpu.bench.shapes import Load

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)

VARIANTS = "none, ours, ours-layerwise, ours-server, lmcache, lmcache-layerwise, lmcache-server"
SHAPES = "8b, 1b or small (default: small on CPU, 1b on GPUs below 32 GiB, else 8b)."
ALL = "may be given several times (default: all)."
ROWS = f"'61440 + 4096', say: the requests of a column of the tables; {ALL}"
LOADS = f"decoding, copying, storing or conversations; {ALL}"
DEVICES = "Devices that share the layers, in each engine; they share its memory, too."
IN_TURN = """All engines at once, asked in turn: a host that changes its speed does so for all of
them. They share the devices out; these need memory for all."""

Names = list[str] | None
ShapeName = Annotated[str | None, typer.Option(help=SHAPES)]
Variants = Annotated[Names, typer.Option(help=f"{VARIANTS} or offloading; {ALL}")]
LoadVariants = Annotated[Names, typer.Option(help=f"{VARIANTS}, offloading or room; {ALL}")]
Rows = Annotated[Names, typer.Option("--row", help=ROWS)]
Loads = Annotated[Names, typer.Option("--load", help=LOADS)]
Repeats = Annotated[int, typer.Option(min=1, help="Of each request or load; medians count.")]
TensorParallel = Annotated[int, typer.Option(min=1, help=DEVICES)]
InTurn = Annotated[bool, typer.Option("--in-turn", help=IN_TURN)]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="With vLLM's compiled graphs: minutes longer.")
]
TimeoutS = Annotated[int, typer.Option(min=1, help="Seconds until an engine starts or answers.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


@app.command()
def engine(
    shape: ShapeName = None,
    variant: Variants = None,
    only: Rows = None,
    repeats: Repeats = 3,
    tensor_parallel: TensorParallel = 1,
    in_turn: InTurn = False,
    graphs: Graphs = False,
    timeout_s: TimeoutS = 900,
    json_file: JsonFile = None,
) -> None:
    """Time hits and stores in a real engine with random weights; nothing is downloaded.

    Compares vLLM without a connector (none), with this package (ours), with LMCache's own
    connectors (lmcache) and with vLLM's OffloadingConnector (offloading). An engine that does not
    start, or restores other bytes than recomputing wrote, is shown as such. Exits with 1 if it is
    one with this package.
    """
    how = (shape, variant, only, repeats, tensor_parallel, in_turn, graphs, timeout_s, json_file)
    results = _measured(*how, under_load=False)
    if any(result.error or result.exact != 1 for result in results):
        raise typer.Exit(1)


@app.command()
def load(
    shape: ShapeName = None,
    variant: LoadVariants = None,
    only: Loads = None,
    repeats: Repeats = 1,
    tensor_parallel: TensorParallel = 1,
    in_turn: InTurn = False,
    graphs: Graphs = False,
    timeout_s: TimeoutS = 900,
    json_file: JsonFile = None,
) -> None:
    """Time four loads in a real engine with random weights; nothing is downloaded.

    What hits cost others: requests decode, alone and then while prompts with cached tokens arrive
    (decoding), of which all but one token may be cached (copying). What storing costs them: the
    same with new prompts (storing). What is gained: conversations at once, more than the engine's
    own cache holds (conversations).

    `room` is an engine whose own cache holds everything. Exits with 1 if an engine with this
    package fails.
    """
    how = (shape, variant, only, repeats, tensor_parallel, in_turn, graphs, timeout_s, json_file)
    if any(result.error for result in _measured(*how, under_load=True)):
        raise typer.Exit(1)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit: ended by it, this process would leave engines behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _measured(
    shape_name: str | None,
    variants: list[str] | None,
    only: list[str] | None,
    repeats: int,
    tensor_parallel: int,
    in_turn: bool,
    graphs: bool,
    timeout_s: int,
    json_file: Path | None,
    *,
    under_load: bool,
) -> list[Result]:
    """Measure, show the figures, and write them after each row; return this package's results.

    Raises:
        SettingsError: there is nothing of a name, or the file can't be written.
    """
    from lmcache_xpu.bench import runner
    from lmcache_xpu.bench.report import EngineFigures, LoadFigures
    from lmcache_xpu.bench.shapes import chosen, default_name, shape_named
    from lmcache_xpu.bench.variants import variants_named
    from lmcache_xpu.harness.outputs import check_file
    from lmcache_xpu.launch.serve import built_for

    if json_file is not None:
        check_file(json_file, "--json")
    shape = shape_named(shape_name or default_name(built_for(), runner.device_memory_bytes()))
    shape = (shape.under_load() if under_load else shape).on_devices(tensor_parallel)
    choices: Mapping[str, Load | Prompts] = shape.loads if under_load else shape.rows
    requests = chosen("load" if under_load else "row", choices, only or ())
    engines = variants_named(shape, variants or (), under_load=under_load)
    exit_on_sigterm()
    console, figures = Console(), LoadFigures if under_load else EngineFigures
    facts = {"machine": runner.machine(), "command": shlex.join(["lmcache-xpu", *sys.argv[1:]])}

    def write(results: list[Result]) -> None:
        if json_file is not None:
            page = facts | figures(shape, results).as_dict()
            json_file.write_text(json.dumps(page, indent=1) + "\n")

    def save(results: list[Result]) -> None:
        with suppress(OSError):  # it is told in the end, when all is measured
            write(results)

    results = runner.run(
        shape,
        engines,
        {name: request.measure for name, request in requests.items()},
        repeats=repeats,
        compare=not under_load,
        in_turn=in_turn,
        graphs=graphs,
        timeout_s=timeout_s,
        console=console,
        save=save,
    )
    figures(shape, results).show(console)
    try:
        write(results)
    except OSError as error:
        raise SettingsError(
            f"--json {json_file} ({error})", "a file that can be written"
        ) from error
    return [result for result in results if result.variant.startswith("ours")]
