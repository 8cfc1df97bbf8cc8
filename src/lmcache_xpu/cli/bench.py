"""`lmcache-xpu bench`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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

decoding: requests decode, alone and then while prompts with cached tokens arrive.
copying: the same, and of those prompts all but one token is cached.
storing: the same with new prompts, which are stored.
conversations: more at once than the engine's own cache holds.

`room` is an engine whose own cache holds everything. Exits with 1 if an engine with this
package fails."""

SHAPES = "8b, for GPUs of 32 GiB and more, 1b or small (default: small on CPU, else 1b)."
VARIANTS = """none, ours, ours-layerwise, ours-server, lmcache, lmcache-layerwise, lmcache-server,
offloading or, of loads, room; may be given several times (default: all)."""
ONLY = """The prompts of a table, '61440 + 4096' say, or a load: decoding, copying, storing or
conversations; may be given several times (default: all)."""
REPEATS = "Of each request or load; medians count (default: 3 of requests, 1 of loads)."
DEVICES = "Devices that share the layers, in each engine; they share its memory, too."
IN_TURN = """All engines run at once and are asked alternately: a host that changes its speed does
so for all of them. They divide the devices' memory, which has to be enough for all."""
GRAPHS = "With vLLM's compiled graphs: minutes longer."

TRACE = """Replay a trace through the tiers' own look-ups and eviction, without an engine.

Says what tiers of several sizes hit, and what they would hit with plain LRU, which evicts the
beginning of a prompt first, and with Belady's optimum, which knows the future. The engine's own
cache counts as empty. Answers are not stored. A disk tier behind memory is waited for: in an
engine it drops what it is too slow for.

FILE: lines of Mooncake's or vLLM's timed_trace, a coding agent's session, ShareGPT's conversations,
or a folder of sessions."""
BEHIND = "Tokens of a disk tier behind each; in files of 8 KiB for a chunk."
TOKEN_BYTES = "Bytes of a token, as `lmcache-xpu size` says; the default is that of Llama 3 8B."
SIZES = "Tokens of a tier; may be given several times (default: all that is stored, 1/2, ... 1/64)."
USERS = "Sessions at once, where the file does not say when they begin."

Names = list[str] | None
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
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
    json_file: JsonFile = None,
) -> None:
    """Measure, show the figures, and write them after each row."""
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


@app.command("trace", help=TRACE)
def trace(
    file: Annotated[Path, typer.Argument(help="File or folder.")],
    tokens: Annotated[list[int] | None, typer.Option(min=1, help=SIZES)] = None,
    disk_tokens: Annotated[int, typer.Option(min=0, help=BEHIND)] = 0,
    token_bytes: Annotated[int, typer.Option(min=1, help=TOKEN_BYTES)] = 131_072,
    users: Annotated[int, typer.Option(min=1, help=USERS)] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 256,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this SVG file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace for each size of a tier, and show what is hit and what is computed."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # else a line for each hit
    from lmcache_xpu.bench.trace import POLICIES, draw, hit_tokens, plain_lru, read, tiers
    from lmcache_xpu.launch.preflight import check_file

    for name, file_to_write in (("--json", json_file), ("--plot", plot)):
        if file_to_write is not None:
            check_file(file_to_write, name)
    requests = read(file, chunk_tokens=chunk_tokens, users=users)
    asked = sum(request.tokens for request in requests)
    stored = len({chunk for request in requests for chunk in request.chunks})
    least = asked - hit_tokens(requests, plain_lru(requests, stored), chunk_tokens)
    sizes = sorted({-(-stored >> halvings) for halvings in range(7)})
    disk, gib, rows = -(-disk_tokens // chunk_tokens), token_bytes / 2**30, list[Any]()
    table = Table("tokens", "GiB", "hit", "hit rate", "from disk", "tier", *POLICIES, box=None)
    for room in [-(-size // chunk_tokens) for size in tokens or ()] or sizes:
        begun = time.monotonic()
        with TemporaryDirectory(prefix="lmcache-xpu-trace-") as directory:
            replayed = list(tiers(requests, min(room, stored), disk, Path(directory)))
        seconds, most = time.monotonic() - begun, min(max(room, disk), stored)
        hits = {"tier": hit_tokens(requests, (hit for hit, _ in replayed), chunk_tokens)}
        for name, policy in POLICIES.items():
            hits[name] = hit_tokens(requests, policy(requests, most), chunk_tokens)
        from_disk = sum(read for _, read in replayed) * chunk_tokens
        computed = {name: (asked - hit) / least for name, hit in hits.items()}
        row: dict[str, Any] = {"tokens": room * chunk_tokens, "hit": hits, "computed": computed}
        row |= {"from_disk": from_disk, "requests_per_s": len(requests) / seconds}
        rows.append(row)
        of_tier = f"{room * chunk_tokens:,}", f"{room * chunk_tokens * gib:.4g}"
        of_hits = f"{hits['tier']:,}", f"{hits['tier'] / asked:.1%}", f"{from_disk:,}"
        table.add_row(*of_tier, *of_hits, *(f"{ratio:.2f}" for ratio in computed.values()))
    about: dict[str, Any] = {"prompts": len(requests), "tokens": asked, "endless_computes": least}
    about |= {"disk_tokens": disk * chunk_tokens, "tiers": rows}
    if json_file is not None:
        json_file.write_text(json.dumps(about, indent=1) + "\n")
    if plot is not None:
        lines = {name: [row["computed"][name] for row in rows] for name in ("tier", *POLICIES)}
        plot.write_text(draw([row["tokens"] for row in rows], lines))
    console = Console(highlight=False)
    console.print(
        f"{len(requests):,} prompts, {asked:,} tokens: endless memory computes {least:,}."
    )
    console.print("tier, plain LRU, optimum: tokens computed, over those.", table, sep="\n")
    speed = min(row["requests_per_s"] for row in rows)
    console.print(f"At least {speed:,.0f} prompts were replayed a second.")


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit: ended by it, this process would leave engines behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
