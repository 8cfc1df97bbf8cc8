"""Connector throughput on CPU, beside a plain copy of the same bytes in the same run.

    python measurements/cpu_connectors.py [--gib 1] [--json FILE]

Each layout stores and loads the chunks of a request whose blocks are scattered over the paged
KV cache. The plain copy moves as many bytes between two contiguous pieces of memory. The figure
is the ratio of the two: 1 is the copy's speed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import paged
import torch
import typer
from rich.console import Console
from rich.table import Table

from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2


@dataclass(frozen=True)
class Case:
    """One row: the cache that is measured, and the ratio to reach."""

    name: str
    model: paged.Model
    layout: paged.Layout
    block: int
    target: float
    opaque: bool = False


CASES = (
    Case("CPU blocks, 128", paged.LLAMA_8B, paged.FUSED_HND, 128, 0.7, opaque=True),
    Case("NHD, 16", paged.LLAMA_8B, paged.NHD, 16, 0.4),
    Case("HND, 16", paged.LLAMA_8B, paged.HND, 16, 0.4),
    Case("fused LBNHC, 64", paged.LLAMA_8B, paged.FUSED_NHD, 64, 0.4),
    Case("fused LBHNC, 64", paged.LLAMA_8B, paged.FUSED_HND, 64, 0.4),
    Case("MLA, 64", paged.MLA, paged.LATENT, 64, 0.4),
)


@dataclass(frozen=True)
class Result:
    """Medians in GB/s (10^9 bytes), and the two ratios to the plain copy."""

    layout: str
    connector: str
    gigabytes: float
    copy_gb_s: float
    store_gb_s: float
    load_gb_s: float
    store_ratio: float
    load_ratio: float
    target: float


def measure(case: Case, gib: float, repeats: int) -> list[Result]:
    """Standard and layerwise connector, and the plain copy, in turn."""
    tokens = max(256, int(gib * 2**30) // case.model.token_bytes // 256 * 256)
    work = paged.Workload(
        case.model, case.layout, block=case.block, tokens=tokens, opaque=case.opaque
    )
    standard = work.connector(VLLMPagedMemXPUConnectorV2)
    layerwise = work.connector(VLLMPagedMemLayerwiseXPUConnector)
    chunks, layers = work.chunks(), work.layers()
    spans = (work.starts, work.ends)
    source = torch.ones_like(work.pool)
    seconds = paged.median_seconds(
        {
            "copy": lambda: work.pool.copy_(source),
            "standard store": lambda: standard.batched_from_gpu(chunks, *spans, **work.request),
            "standard load": lambda: standard.batched_to_gpu(chunks, *spans, **work.request),
            "layerwise store": lambda: paged.store_layers(layerwise, work, layers),
            "layerwise load": lambda: paged.load_layers(layerwise, work, layers),
        },
        repeats,
        lambda: None,
    )
    rate = {name: work.bytes / s / 1e9 for name, s in seconds.items()}
    return [
        Result(
            layout=case.name,
            connector=kind,
            gigabytes=work.bytes / 1e9,
            copy_gb_s=rate["copy"],
            store_gb_s=rate[f"{kind} store"],
            load_gb_s=rate[f"{kind} load"],
            store_ratio=rate[f"{kind} store"] / rate["copy"],
            load_ratio=rate[f"{kind} load"] / rate["copy"],
            target=case.target,
        )
        for kind in ("standard", "layerwise")
    ]


def main(
    gib: Annotated[float, typer.Option(help="Bytes moved per layout, GiB")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Timed repeats; the median counts")] = 5,
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures here")] = None,
) -> None:
    """Measure every layout and print a table."""
    console = Console()
    table = Table(title=f"Connectors on CPU, {torch.get_num_threads()} threads, ratio to a copy")
    for column in ("layout", "connector", "copy GB/s", "store", "load", "target"):
        table.add_column(column, justify="left" if column in ("layout", "connector") else "right")
    results = []
    with console.status("") as status:
        for case in CASES:
            status.update(case.name)
            for r in measure(case, gib, repeats):
                results.append(r)
                table.add_row(
                    r.layout,
                    r.connector,
                    f"{r.copy_gb_s:.1f}",
                    f"{r.store_ratio:.2f}",
                    f"{r.load_ratio:.2f}",
                    f"{r.target}",
                )
    console.print(table)
    if report is not None:
        facts = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "results": [asdict(result) for result in results],
        }
        report.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
