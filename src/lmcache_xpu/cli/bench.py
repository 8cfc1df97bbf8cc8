"""`lmcache-xpu bench`."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from lmcache_xpu.errors import SettingsError

if TYPE_CHECKING:
    from lmcache_xpu.bench.outputs import Outputs, Page
    from lmcache_xpu.bench.shapes import Shape

R = TypeVar("R")

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)

VARIANTS = "none, ours, ours-layerwise, ours-server, lmcache, lmcache-layerwise, lmcache-server"
ALL = "may be given several times (default: all)."


def _finite(seconds: float) -> float:
    """Refuse nan and inf, which are floats to a command line."""
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds.")
    return seconds


TimeoutS = Annotated[
    float,
    typer.Option(min=1, callback=_finite, help="Seconds until an engine starts or answers."),
]
ShapeName = Annotated[
    str | None,
    typer.Option(help="8b, 1b or small (default: small on CPU, 1b on GPUs below 32 GiB, else 8b)."),
]
Variants = Annotated[list[str] | None, typer.Option(help=f"{VARIANTS} or offloading; {ALL}")]
LoadVariants = Annotated[
    list[str] | None,
    typer.Option(help=f"{VARIANTS}, offloading, ours-step, ours-async, room or seats; {ALL}"),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--row", help=f"'61440 + 4096', say: the requests of a column of the tables; {ALL}"
    ),
]
Loads = Annotated[
    list[str] | None,
    typer.Option("--load", help=f"decoding, copying, storing, conversations or sharing; {ALL}"),
]
Repeats = Annotated[
    int, typer.Option(min=1, help="Of each request, of later turns three each; medians count.")
]
LoadRepeats = Annotated[int, typer.Option(min=1, help="Of each load; medians count.")]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1, help="Devices that share the layers, in each engine; they share its memory, too."
    ),
]
InTurn = Annotated[
    bool,
    typer.Option(
        "--in-turn",
        help="All engines at once, asked in turn: a host that changes its speed does so for all of "
        "them. They share the devices out; these need memory for all.",
    ),
]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="With vLLM's compiled graphs; they take minutes.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Write a picture to this file (.png, .svg).")
]
Report = Annotated[
    Path | None, typer.Option(help="Write one file with versions, device and figures.")
]


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
    plot_file: PlotFile = None,
    report: Report = None,
) -> None:
    """Time hits and stores in a real engine with random weights; nothing is downloaded.

    Compares vLLM without a connector (none), with this package (ours), with LMCache's own
    connectors (lmcache) and with vLLM's OffloadingConnector (offloading). An engine that does not
    start, or restores other bytes than recomputing wrote, is shown as such. Exits with 1 if it is
    one with this package.
    """
    from lmcache_xpu.bench import runner
    from lmcache_xpu.bench.jobs import row_jobs
    from lmcache_xpu.bench.outputs import Outputs
    from lmcache_xpu.bench.report import Figures
    from lmcache_xpu.bench.shapes import default_name, shape_named
    from lmcache_xpu.bench.variants import variants_named
    from lmcache_xpu.launch.serve import built_for

    outputs = Outputs(json_file=json_file, report=report, plot_file=plot_file)
    outputs.check()
    model = shape_named(shape or default_name(built_for(), runner.device_memory_bytes()))
    model = model.on_devices(tensor_parallel)
    variants, jobs = variants_named(model, variant), row_jobs(model, only or ())
    command = _command("engine", model, repeats, variant, in_turn=in_turn, graphs=graphs)
    command += "".join(f" --row '{name}'" for name in only or ())
    run = partial(
        runner.run,
        model,
        variants,
        jobs,
        repeats=repeats,
        in_turn=in_turn,
        graphs=graphs,
        timeout_s=timeout_s,
    )
    results = _measured(run, partial(Figures, model), outputs, command)
    ours = [result for result in results if result.variant.startswith("ours")]
    if any(result.error or result.exact != 1 for result in ours):
        raise typer.Exit(1)


@app.command()
def load(
    shape: ShapeName = None,
    variant: LoadVariants = None,
    only: Loads = None,
    repeats: LoadRepeats = 1,
    tensor_parallel: TensorParallel = 1,
    in_turn: InTurn = False,
    graphs: Graphs = False,
    timeout_s: TimeoutS = 900,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    report: Report = None,
) -> None:
    """Time five loads in a real engine with random weights; nothing is downloaded.

    What hits cost others: requests decode, alone and then while prompts with cached tokens arrive
    (decoding), of which all but one token may be cached (copying). What storing costs them: the
    same with new prompts (storing). What is gained: conversations at once, more than the engine's
    own cache holds (conversations). And many at once that begin alike (sharing).

    `room` is an engine whose own cache holds everything. `seats` has such a cache, and takes no
    more requests at once than fit the others': what no tier can beat.

    Exits with 1 if an engine with this package fails.
    """
    from lmcache_xpu.bench import runner
    from lmcache_xpu.bench.load import load_named
    from lmcache_xpu.bench.outputs import Outputs
    from lmcache_xpu.bench.report import LoadFigures
    from lmcache_xpu.bench.shapes import default_name
    from lmcache_xpu.bench.variants import variants_named
    from lmcache_xpu.launch.serve import built_for

    outputs = Outputs(json_file=json_file, report=report, plot_file=plot_file)
    outputs.check()
    loads = load_named(shape or default_name(built_for(), runner.device_memory_bytes()))
    loads = loads.on_devices(tensor_parallel)
    jobs = loads.jobs(only or ())
    variants = variants_named(loads.shape, variant, loads.more_variants())
    command = _command("load", loads.shape, repeats, variant, in_turn=in_turn, graphs=graphs)
    command += "".join(f" --load {name}" for name in only or ())
    run = partial(
        runner.run,
        loads.shape,
        variants,
        jobs,
        repeats=repeats,
        compare=False,
        in_turn=in_turn,
        graphs=graphs,
        timeout_s=timeout_s,
    )
    results = _measured(run, partial(LoadFigures, loads), outputs, command)
    if any(result.error for result in results if result.variant.startswith("ours")):
        raise typer.Exit(1)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit: ended by it, this process would leave engines behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _measured(
    run: Callable[..., list[R]],
    page: Callable[[list[R]], Page],
    outputs: Outputs,
    command: str,
) -> list[R]:
    """Measure, show the figures, and write them to files after each row; return the results.

    Args:
        run: measures; gets a console, and what saves the results so far.
        page: makes the figures of results.
        outputs: the files.
        command: that repeats it.

    Raises:
        SettingsError: a file could not be written.
    """
    from lmcache_xpu.bench.runner import machine

    exit_on_sigterm()
    console, facts = Console(), machine()
    failures: list[str] = []

    def save(results: list[R]) -> None:
        failures[:] = outputs.write(page(results), facts, command)

    results = run(console=console, save=save)
    page(results).show(console)
    if failures:
        raise SettingsError(
            "; ".join(failures),
            "files that can be written",
            "The figures are above, and in the other files that were named.",
        )
    outputs.name(console)
    return results


def _command(
    bench: str,
    shape: Shape,
    repeats: int,
    variants: list[str] | None,
    *,
    in_turn: bool,
    graphs: bool,
) -> str:
    """Return the command line that repeats a run."""
    words = [f"lmcache-xpu bench {bench}", f"--shape {shape.name}", f"--repeats {repeats}"]
    words += [f"--tensor-parallel {shape.devices}"] * (shape.devices > 1)
    words += [f"--variant {name}" for name in variants or ()]
    words += ["--in-turn"] * in_turn + ["--graphs"] * graphs
    return " ".join(words)
