"""Connector throughput on an accelerator, beside the raw pinned copy, in one run.

    python measurements/device_connectors.py [--gib 1] [--json FILE]

Moves one request between a paged KV cache on the device and pinned host memory: our standard and
layerwise connectors on every layout; per-layer loops of index_select and index_copy, as the first
XPU connectors had; LMCache's own connectors where its compiled ops load. Also one chunk alone,
many small chunks, and a layerwise load beside compute. Medians; GB/s are 10^9 bytes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import paged
import torch
import typer
from rich.console import Console
from rich.table import Table

from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2

DEVICE = str(torch.accelerator.current_accelerator() or "cpu")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: paged.Model
    layout: paged.Layout
    block: int
    peers: bool = False  # LMCache's connectors and the loops as well
    tokens: int | None = None  # of the request; else as many as fit the bytes
    chunk: int = 256

    @property
    def name(self) -> str:
        """The name for readers."""
        size = "" if self.tokens is None else f", {self.tokens // self.chunk} x {self.chunk} tokens"
        return f"{self.model.name}, {self.layout.name}, blocks of {self.block}{size}"


CASES = (
    Case(paged.LLAMA_8B, paged.NHD, 16, peers=True),
    Case(paged.LLAMA_8B, paged.NHD, 64),
    Case(paged.LLAMA_8B, paged.NHD, 128),
    Case(paged.LLAMA_8B, paged.HND, 16),
    Case(paged.LLAMA_8B, paged.HND, 64),
    Case(paged.LLAMA_8B, paged.FUSED_NHD, 64),
    Case(paged.LLAMA_8B, paged.FUSED_HND, 64),
    Case(paged.LLAMA_70B, paged.NHD, 16, peers=True),
    Case(paged.LLAMA_70B, paged.FUSED_NHD, 64),
    Case(paged.MLA, paged.LATENT, 64),
    Case(paged.LLAMA_8B, paged.NHD, 16, peers=True, tokens=256),
    Case(paged.LLAMA_8B, paged.NHD, 16, peers=True, tokens=8192, chunk=32),
)


@dataclass
class Result:
    """GB/s by action; `skipped` says why an action has none."""

    case: str
    bytes: int
    gb_s: dict[str, float]
    microseconds: dict[str, float]
    skipped: dict[str, str] = field(default_factory=dict)


def settle() -> None:
    """Wait for the device."""
    torch.accelerator.synchronize()


def measure(case: Case, gib: float, repeats: int) -> Result:
    """All connectors on one workload, in turn."""
    fit = int(gib * 2**30) // case.model.token_bytes // case.chunk * case.chunk
    work = paged.Workload(
        case.model,
        case.layout,
        block=case.block,
        tokens=case.tokens or fit,
        chunk=case.chunk,
        device=DEVICE,
    )
    spans = (work.starts, work.ends)
    chunks, layers = work.chunks(), work.layers()
    standard = work.connector(VLLMPagedMemXPUConnectorV2)
    layerwise = work.connector(VLLMPagedMemLayerwiseXPUConnector)
    device_memory = torch.ones(work.pool.shape, dtype=work.pool.dtype, device=DEVICE)
    actions: dict[str, Callable[[], object]] = {
        "raw store": lambda: work.pool.copy_(device_memory, non_blocking=True),
        "raw load": lambda: device_memory.copy_(work.pool, non_blocking=True),
        "standard store": lambda: standard.batched_from_gpu(chunks, *spans, **work.request),
        "standard load": lambda: standard.batched_to_gpu(chunks, *spans, **work.request),
        "layerwise store": lambda: paged.store_layers(layerwise, work, layers),
        "layerwise load": lambda: paged.load_layers(layerwise, work, layers),
    }
    skipped: dict[str, str] = {}
    if case.peers:
        actions["loops store"], actions["loops load"] = loops(work, chunks)
        try:
            actions |= native(work, chunks, work.layers())
        except Exception as error:  # whatever keeps a foreign package from loading is the result
            skipped["LMCache"] = f"{type(error).__name__}: {error}"[:300]
    seconds = paged.median_seconds(actions, repeats, settle)
    return Result(
        case.name,
        work.bytes,
        {name: work.bytes / s / 1e9 for name, s in seconds.items()},
        {name: s * 1e6 for name, s in seconds.items()},
        skipped,
    )


def loops(work: paged.Workload, chunks: list[Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Per chunk, layer and plane one index operation and one copy, all in one stream."""
    slots = work.slots.to(DEVICE)
    block, heads = work.kvcaches[0].shape[2], work.kvcaches[0].shape[3]

    def store() -> None:
        for chunk, start, end in zip(chunks, work.starts, work.ends, strict=True):
            at = slots[start:end]
            for layer, cache in enumerate(work.kvcaches):
                for plane in range(2):
                    tokens = cache[at // block, plane, at % block]
                    chunk.tensor[plane, layer].copy_(tokens.flatten(1), non_blocking=True)
        settle()

    def load() -> None:
        for chunk, start, end in zip(chunks, work.starts, work.ends, strict=True):
            at = slots[start:end]
            for layer, cache in enumerate(work.kvcaches):
                for plane in range(2):
                    tokens = chunk.tensor[plane, layer].to(DEVICE, non_blocking=True)
                    tokens = tokens.unflatten(1, (heads, -1))
                    cache[:, plane].index_put_((at // block, at % block), tokens)
        settle()

    return store, load


def native(
    work: paged.Workload, chunks: list[Any], layers: list[list[Any]]
) -> dict[str, Callable[[], object]]:
    """LMCache's own connectors for CUDA; raises where they don't load."""
    from lmcache.v1.metadata import LMCacheMetadata

    from lmcache_xpu.versions.lmcache import in_process_module

    stock = in_process_module("v1.gpu_connector.gpu_connectors")

    model = work.model
    chunk = work.ends[0] - work.starts[0]
    shape = (model.layers, 2, chunk, model.heads, model.dim)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, paged.DTYPE, shape)
    device = torch.device(f"{DEVICE.partition(':')[0]}:0")
    hints = {"kv_layout": work.layout.hint}
    standard = stock.VLLMPagedMemGPUConnectorV2.from_metadata(
        metadata, True, device, layout_hints=hints
    )
    layerwise = stock.VLLMPagedMemLayerwiseGPUConnector.from_metadata(
        metadata, True, device, layout_hints=hints
    )
    request = {"kvcaches": work.kvcaches, "slot_mapping": work.slots.to(device), "offset": 0}
    spans = (work.starts, work.ends)
    synchronous = {**request, "sync": True}
    standard.batched_from_gpu(chunks, *spans, **request)  # raises here, not when it is timed
    paged.store_layers(layerwise, work, layers, **synchronous)
    return {
        "LMCache standard store": lambda: standard.batched_from_gpu(chunks, *spans, **request),
        "LMCache standard load": lambda: standard.batched_to_gpu(chunks, *spans, **request),
        "LMCache layerwise store": lambda: paged.store_layers(
            layerwise, work, layers, **synchronous
        ),
        "LMCache layerwise load": lambda: paged.load_layers(layerwise, work, layers, **synchronous),
    }


def overlap(gib: float, repeats: int) -> dict[str, float]:
    """A layerwise load beside matrix products that take as long per layer; milliseconds."""
    tokens = int(gib * 2**30) // paged.LLAMA_8B.token_bytes // 256 * 256
    work = paged.Workload(paged.LLAMA_8B, paged.FUSED_NHD, block=64, tokens=tokens, device=DEVICE)
    connector, layers = work.connector(VLLMPagedMemLayerwiseXPUConnector), work.layers()
    matrix = torch.randn(4096, 4096, device=DEVICE, dtype=paged.DTYPE)
    load = {"load": lambda: paged.load_layers(connector, work, layers)}
    load_s = paged.median_seconds(load, repeats, settle)["load"]
    fifty = {"products": lambda: [matrix @ matrix for _ in range(50)]}
    product_s = paged.median_seconds(fifty, 5, settle)["products"] / 50
    products = max(1, round(load_s / work.model.layers / product_s))

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    seconds = paged.median_seconds(
        load
        | {
            "compute": lambda: [compute() for _ in range(work.model.layers)],
            "both": lambda: paged.load_layers(connector, work, layers, compute),
        },
        repeats,
        settle,
    )
    ratio = seconds["both"] / max(seconds["load"], seconds["compute"])
    return {name: s * 1e3 for name, s in seconds.items()} | {"both / the longer": ratio}


def main(
    gib: Annotated[float, typer.Option(help="Bytes moved per case, GiB")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Timed repeats; the median counts")] = 7,
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures here")] = None,
) -> None:
    """Measure every case on the accelerator of this machine and print tables."""
    if DEVICE == "cpu":
        raise typer.BadParameter("PyTorch sees no accelerator: use measurements/cpu_connectors.py")
    with contextlib.suppress(ImportError):  # an engine has loaded vLLM's operations
        import vllm._custom_ops  # noqa: F401  # for what it loads
    console = Console(width=150)
    begin = time.perf_counter()
    results = []
    for case in CASES:
        result = measure(case, gib, repeats)
        results.append(result)
        table = Table(title=result.case, title_justify="left", box=None)
        for column in ("", "store GB/s", "of raw", "load GB/s", "of raw"):
            table.add_column(column, justify="right" if column else "left")
        for kind in dict.fromkeys(name.rpartition(" ")[0] for name in result.gb_s):
            cells = []
            for way in ("store", "load"):
                rate = result.gb_s[f"{kind} {way}"]
                cells += [f"{rate:.1f}", f"{rate / result.gb_s[f'raw {way}']:.3f}"]
            table.add_row(kind, *cells)
        console.print(table)
        for name, reason in result.skipped.items():
            console.print(f"  {name}: {reason}")
    overlap_ms = overlap(gib, repeats)
    console.print("overlap, ms:", {name: round(value, 2) for name, value in overlap_ms.items()})
    if report is not None:
        facts = {
            "device": torch.get_device_module(DEVICE).get_device_name(),
            "torch": torch.__version__,
            "seconds": time.perf_counter() - begin,
            "results": [asdict(result) for result in results],
            "overlap_ms": overlap_ms,
        }
        report.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
