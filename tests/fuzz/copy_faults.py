"""Faults in what is copied where."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from fault import Faults
from support.kernels import TritonTransfer

from lmcache_xpu.gpu_connector import base
from lmcache_xpu.gpu_connector.base import PagedMemConnector
from lmcache_xpu.transfer import plan, slots
from lmcache_xpu.transfer.gather_scatter import TorchTransfer
from lmcache_xpu.transfer.host_copies import HostCopies
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.slots import RequestRows, Rows
from lmcache_xpu.transfer.staging import Stager

FAULTS = Faults()
fault = FAULTS.add


@fault("the last row is off by one", "copies", slots, "RequestRows")
def _(made: Any) -> Any:
    def wrong(view: PagedView, rows: torch.Tensor, spans: Any) -> RequestRows:
        rows = rows.clone()
        rows[-1:] -= (rows[-1:] >= 1).to(rows.dtype)
        return made(view, rows, spans)

    return wrong


@fault("tokens without a slot go to the first one", "copies", slots, "RequestRows")
def _(made: Any) -> Any:
    return lambda view, rows, spans: made(view, rows.clamp(min=0), spans)


@fault("keys and values of the last layer are exchanged", "copies", PagedView, "from_engine")
def _(read: Any) -> Any:
    def wrong(*args: Any, **options: Any) -> PagedView:
        view = read(*args, **options)
        tensors = (*view.tensors[:-1], view.tensors[-1][::-1])
        return PagedView(tensors, view.tokens_per_row)

    return wrong


@fault("the last token of the last chunk is left out", "copies", RequestRows, "chunks")
def _(chunks: Any) -> Any:
    def wrong(self: RequestRows, first: int, last: int) -> Rows:
        rows = chunks(self, first, last)
        if last < len(self.totals):
            return rows
        host = torch.arange(len(rows.engine)) if rows.host is None else rows.host
        return Rows(rows.engine[:-1], host[:-1])

    return wrong


@fault("tokens that the engine has are overwritten", "copies", base, "request_rows")
def _(rows: Any) -> Any:
    return lambda view, slots, spans, cached: rows(view, slots, spans, 0)


@fault(
    "a cache that the engine moved is not looked at anew",
    "copies",
    PagedMemConnector,
    "registered",
)
def _(registered: Any) -> Any:
    return lambda self, kvcaches=None: self._stager or registered(self, kvcaches)


@fault("addresses of another layer's chunks are used", "copies", Stager, "_table")
def _(table: Any) -> Any:
    def wrong(self: Stager, piece: plan.Piece, memory: Any) -> Any:
        first = vars(piece.rows).setdefault("tables", {})
        if piece.chunks not in first:  # the memory is kept, too
            first[piece.chunks] = memory, table(self, piece, memory)
        return first[piece.chunks][1]

    return wrong


@fault("planes and layers of host memory are exchanged", "copies", plan._ORDERS, "planes")
def _(_: Any) -> Any:
    return (2, 1, 3)


@fault("heads are taken to lie side by side", "copies", TorchTransfer, "of")
def _(prepare: Any) -> Any:
    def wrong(view: PagedView) -> TorchTransfer:
        made = prepare(view)
        return dataclasses.replace(made, within=torch.arange(len(made.within)))

    return wrong


@fault("a store does not bring the rows that stay", "copies", Stager, "_store_staged")
def _(stage: Any) -> Any:
    def wrong(self: Stager, *args: Any) -> None:
        with mock.patch.object(self._host, "load", return_value=None):
            stage(self, *args)

    return wrong


@fault("values are taken from where keys are", "copies", plan, "_pieces")
def _(pieces: Any) -> Any:
    return lambda *args: (
        dataclasses.replace(piece, offsets=piece.offsets[:1] * len(piece.offsets))
        for piece in pieces(*args)
    )


@fault("the last of several pieces is left out", "copies", plan.Piece, "parts")
def _(parts: Any) -> Any:
    def wrong(self: plan.Piece, buffer_bytes: int) -> list[plan.Piece]:
        every = list(parts(self, buffer_bytes))
        return every[:-1] or every

    return wrong


@fault("every group of layers goes to the first one", "copies", Stager, "load")
def _(load: Any) -> Any:
    return lambda self, pieces, memory, first=0, **options: load(self, pieces, memory, 0, **options)


@fault("what is stored through other pinned memory stays in it", "copies", HostCopies, "store")
def _(store: Any) -> Any:
    return lambda self, *args, pinned: store(self, *args, pinned=pinned) if pinned else None


@fault("the kernel takes every row of a chunk", "copies", TritonTransfer, "_launch")
def _(launch: Any) -> Any:
    return lambda self, rows, *args, **options: launch(
        self, Rows(rows.engine, None), *args, **options
    )
