"""The ways that bytes can take: connectors, orders of host memory, kernels, staging buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import oracle
from hypothesis import strategies as st
from layouts import Layout
from lmcache.v1.memory_management import MemoryFormat
from support.kernels import INTERPRET, TritonTransfer

from lmcache_xpu.copies import group_copies
from lmcache_xpu.gpu_connector import base
from lmcache_xpu.gpu_connector.base import PagedMemConnector
from lmcache_xpu.gpu_connector.layerwise import VLLMPagedMemLayerwiseXPUConnector
from lmcache_xpu.gpu_connector.standard import VLLMPagedMemXPUConnectorV2
from lmcache_xpu.transfer import staging
from lmcache_xpu.transfer.gather_scatter import TorchTransfer
from lmcache_xpu.transfer.host_copies import HostCopies, StagingRing
from lmcache_xpu.transfer.staging import Stager

ORDERS = ("planes", "layers", "rows")


@dataclass(frozen=True)
class Way:
    """How a connector moves bytes.

    order: of host memory; `rows` is the layerwise connector's. buffer: size of a staging buffer in
    hundredths of a chunk's largest layer; 0 for no staging.
    """

    order: str
    triton: bool
    buffer: int
    buffers: int
    pinned: bool


every = st.builds(
    Way,
    order=st.sampled_from(ORDERS),
    triton=st.integers(0, 5).map(lambda n: n == 5),
    buffer=st.sampled_from((0, 100, 130, 250, 400, 1000, 5000, 90)),
    buffers=st.integers(2, 4),
    pinned=st.booleans(),
)


@contextmanager
def taken(way: Way, buffer_bytes: int) -> Iterator[None]:
    """While this lasts, connectors that are bound take this way."""

    def stager(view: object, staging_bytes: int | None, **options: object) -> Stager:
        made = Stager(view, staging_bytes, in_place=not way.buffer, **options)
        if way.buffer:
            made.buffer_bytes = buffer_bytes
            made._ring = StagingRing(buffer_bytes, way.buffers, view.device)
        return made

    with ExitStack() as stack:

        def patch(place: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        patch(base, "Stager", stager)
        patch(group_copies, "Stager", stager)
        patch(staging, "transfer_of", TritonTransfer.of if way.triton else TorchTransfer.of)
        patch(StagingRing, "allocate", lambda wanted, device: StagingRing(1, 1, device))
        if way.triton:
            patch(TritonTransfer, "warm_up", lambda self: True)  # slow in the interpreter
            stack.enter_context(mock.patch.dict("os.environ", INTERPRET))
        if way.pinned:
            patch(HostCopies, "pinned", lambda self, memory, at_least=None: True)
        yield


def groups_of(connector: PagedMemConnector) -> list[tuple[int, int]]:
    """For each memory object of a chunk its first layer, and the one after its last."""
    layers = connector.num_layers
    if not connector.LAYERWISE:
        return [(0, layers)]
    return [(layer, layer + 1) for layer in range(layers)]


def connect(layout: Layout, way: Way) -> PagedMemConnector:
    layerwise = way.order == "rows"
    kind = VLLMPagedMemLayerwiseXPUConnector if layerwise else VLLMPagedMemXPUConnectorV2
    return kind(
        layout.hidden,
        layout.sizes["l"],
        dtype=layout.dtype,
        device="cpu",
        use_mla=layout.mla,
        layout_hints={"kv_layout": layout.hint} if layout.hint else None,
        opaque_blocks=layout.opaque,
        layer_major=way.order == "layers",
    )


def format_of(connector: PagedMemConnector) -> MemoryFormat:
    return MemoryFormat.KV_MLA_FMT if connector.use_mla else connector.FORMAT


def chunks_of(
    objs: Sequence[Sequence], connector: PagedMemConnector, way: Way, spans: Sequence[tuple]
) -> list[oracle.Chunk]:
    """Of objects `[group][chunk]`, what the oracle must know."""
    groups = groups_of(connector)
    room = groups[0][1]
    return [
        oracle.Chunk(obj.meta.address, start, end, way.order, room, first, last - first)
        for (first, last), group in zip(groups, objs, strict=True)
        for obj, (start, end) in zip(group, spans, strict=True)
    ]


def call(
    connector: PagedMemConnector, direction: str, objs: Sequence[Sequence], **arguments
) -> None:
    """As LMCache's engine drives either connector, to the end."""
    move = getattr(connector, direction)
    if not connector.LAYERWISE:
        move(objs[0], **arguments)
    elif direction == "batched_from_gpu":
        steps = move(objs, **arguments)
        for _ in range(len(objs) + 1):
            next(steps)
    else:
        steps = move(**arguments)
        next(steps)
        for group in objs:
            steps.send(group)
        next(steps)
