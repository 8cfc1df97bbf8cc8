"""Paged KV caches, host memory and requests whose moves the connectors are timed by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2

DTYPE = torch.bfloat16
Ours = TypeVar("Ours", VLLMPagedMemXPUConnectorV2, VLLMPagedMemLayerwiseXPUConnector)


@dataclass(frozen=True)
class Model:
    """The shape of a model's KV cache; MLA where there are no heads."""

    name: str
    layers: int
    heads: int
    dim: int

    @property
    def mla(self) -> bool:
        """One latent plane instead of keys and values."""
        return self.heads == 0

    @property
    def hidden(self) -> int:
        """Elements of one token in one plane."""
        return self.dim if self.mla else self.heads * self.dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return (1 if self.mla else 2) * self.layers * self.hidden * DTYPE.itemsize


LLAMA_8B = Model("8B, 32 x 8 x 128", 32, 8, 128)
LLAMA_70B = Model("70B, 80 x 8 x 128", 80, 8, 128)
MLA = Model("MLA, 61 x 576", 61, 0, 576)


@dataclass(frozen=True)
class Layout:
    """A layout: its dimensions (see `engine_layout`), and their order in memory."""

    name: str
    axes: str
    memory: str
    hint: str
    one_buffer: bool = False  # all layers in one allocation, as vLLM has them since 0.26


NHD = Layout("NHD", "bknhd", "bknhd", "NHD")
HND = Layout("HND", "bkhnd", "bkhnd", "HND")
FUSED_NHD = Layout("fused LBNHC", "bhnc", "bnhc", "LBNHC", True)
FUSED_HND = Layout("fused LBHNC", "bhnc", "bhnc", "LBHNC", True)
LATENT = Layout("latent", "bhnc", "bnhc", "LBNHC", True)


class Workload:
    """One request whose blocks are scattered over a paged KV cache, and its host memory.

    Args:
        model: the shapes.
        layout: the engine's layout of its cache.
        block: tokens per block.
        tokens: the request's; a multiple of `block` and `chunk`.
        chunk: tokens per chunk.
        device: where the engine's cache is; host memory is pinned unless that is the host.
        opaque: blocks are opaque.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        *,
        block: int,
        tokens: int,
        chunk: int = 256,
        device: str = "cpu",
        opaque: bool = False,
    ) -> None:
        self.model, self.layout, self.device, self.opaque = model, layout, device, opaque
        needed = tokens // block
        total = needed + needed // 4 + 4  # the request does not own the whole cache
        sizes = {"b": total, "k": 2, "n": block, "h": max(1, model.heads), "d": model.dim}
        sizes["c"] = model.dim * (1 if model.mla else 2)
        shape = [sizes[a] for a in layout.memory]
        order = [layout.memory.index(a) for a in layout.axes]
        if layout.one_buffer:
            buffers = list(_noise([model.layers, *shape], device))
        else:
            buffers = [_noise(shape, device) for _ in range(model.layers)]
        self.kvcaches = [buffer.permute(order) for buffer in buffers]
        blocks = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:needed]
        self.slots = (blocks[:, None] * block + torch.arange(block)).flatten()
        self.starts = list(range(0, tokens, chunk))
        self.ends = [start + chunk for start in self.starts]
        self.bytes = tokens * model.token_bytes
        self.pool = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        self.pool.fill_(1)
        self.request = {"kvcaches": self.kvcaches, "slot_mapping": self.slots}

    def connector(
        self, kind: type
    ) -> VLLMPagedMemXPUConnectorV2 | VLLMPagedMemLayerwiseXPUConnector:
        """One of our connectors for this cache."""
        return kind(
            self.model.hidden,
            self.model.layers,
            use_mla=self.model.mla,
            layout_hints={"kv_layout": self.layout.hint},
            opaque_blocks=self.opaque,
        )

    def chunks(self) -> list[TensorMemoryObj]:
        """Memory objects of the standard format, one after another in the pool."""
        fmt = MemoryFormat.KV_MLA_FMT if self.model.mla else MemoryFormat.KV_2LTD
        planes = 1 if self.model.mla else 2
        tokens = self.ends[0] - self.starts[0]
        shape = torch.Size([planes, self.model.layers, tokens, self.model.hidden])
        pieces = self.pool.view(len(self.starts), -1)
        return [_memory(piece, shape, fmt) for piece in pieces]

    def layers(self) -> list[list[TensorMemoryObj]]:
        """Memory objects `[layer][chunk]`; each chunk's lie side by side as LMCache has them."""
        fmt = MemoryFormat.KV_MLA_FMT if self.model.mla else MemoryFormat.KV_T2D
        rows, hidden = self.ends[0] - self.starts[0], self.model.hidden
        shape = torch.Size([rows, hidden] if self.model.mla else [rows, 2, hidden])
        pieces = self.pool.view(len(self.starts), self.model.layers, -1)
        return [
            [_memory(chunk[layer], shape, fmt) for chunk in pieces]
            for layer in range(self.model.layers)
        ]


def store_layers(connector: Any, work: Workload, objs: Any, **arguments: Any) -> None:
    """Do what LMCache does to store a request layer by layer."""
    request = {**work.request, **arguments}
    steps = connector.batched_from_gpu(objs, work.starts, work.ends, **request)
    for _ in range(len(objs) + 1):
        next(steps)


def load_layers(
    connector: Any,
    work: Workload,
    objs: Any,
    compute: Callable[[], object] | None = None,
    **arguments: Any,
) -> None:
    """Do what LMCache and vLLM do to load a request layer by layer, with compute in between."""
    request = {**work.request, **arguments}
    steps = connector.batched_to_gpu(work.starts, work.ends, **request)
    next(steps)
    steps.send(objs[0])
    for layer in range(work.model.layers):
        steps.send(objs[layer + 1] if layer + 1 < len(objs) else None)
        if compute is not None:
            compute()


def median_seconds(
    actions: dict[str, Callable[[], object]], repeats: int, settle: Callable[[], object]
) -> dict[str, float]:
    """Run the actions in turn, so that drift hits all alike; the first round is the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            settle()
            begin = time.perf_counter()
            action()
            settle()
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _noise(shape: Sequence[int], device: str) -> torch.Tensor:
    return torch.randint(0, 2**15, tuple(shape), dtype=torch.int16, device=device).view(DTYPE)


def _memory(piece: torch.Tensor, shape: torch.Size, fmt: MemoryFormat) -> TensorMemoryObj:
    flat = piece.view(-1)
    # Two references: this memory is never given back to an allocator.
    facts = MemoryObjMetadata(shape, DTYPE, 0, flat.nbytes, 2, fmt=fmt)
    return TensorMemoryObj(flat, facts, None)
