"""Plans of made-up requests."""

from __future__ import annotations

import torch

from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostFormat, Plan
from lmcache_xpu.transfer.slots import RequestRows

ROW = 4  # bytes


def plan(
    sizes: list[int], layers: int, buffer: int, *, planes: int = 2, order="planes", starts=(0,)
) -> Plan:
    spans, at = [], 0
    for size in sizes:
        spans.append((at, at, at + size))
        at += size
    view = PagedView(tensors=((torch.zeros(at + 1, 1, 1, ROW),),))
    rows = RequestRows(view, torch.arange(at), spans)
    return Plan(HostFormat(layers, planes, order), rows, ROW, buffer, starts)
