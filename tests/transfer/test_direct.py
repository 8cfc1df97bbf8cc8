"""Kernels that read host memory: what they need, and how often addresses are uploaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.plans import plan
from support.tuned import tuned

from lmcache_xpu.transfer import direct
from lmcache_xpu.transfer.direct import HostKernels
from lmcache_xpu.transfer.plan import HostMemory, LayerGroup


class Transfer:
    """Notes what it is told to move."""

    def __init__(self, aligned: bool = True) -> None:
        self.moved: list[tuple[list[int], list[int], int]] = []
        self._aligned = aligned

    def aligned(self, addresses: torch.Tensor) -> bool:
        return self._aligned

    def move_chunks(self, rows: Any, table: Any, form: Any, layer: int, **options: Any) -> None:
        self.moved.append((rows.engine.tolist(), table.tolist(), layer))


def kernels(transfer: Transfer, *, pinned: bool = True) -> HostKernels:
    host: Any = SimpleNamespace(pinned=lambda memory, at_least: pinned)
    return HostKernels(transfer, torch.device("cpu"), host)


def chunks(count: int = 3) -> HostMemory:
    return HostMemory([torch.zeros(2 * 4 * 2 * 4, dtype=torch.uint8) for _ in range(count)])


def groups() -> list[LayerGroup]:
    return plan([2, 2, 2], 4, 0, starts=(0, 1, 3)).groups


def test_addresses_are_uploaded_once_for_all_layers_and_anew_for_other_memory(monkeypatch):
    uploads: list[torch.Tensor] = []

    def upload(addresses: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploads.append(addresses)
        return addresses

    monkeypatch.setattr(direct, "upload", upload)
    mover = kernels(transfer := Transfer())
    for memory in (chunks(), chunks()):
        for group in groups():
            assert mover.suits(group.pieces, memory)
            for piece in group.pieces:
                assert mover.move(piece, memory, 10, gather=False)
        addresses = [chunk.data_ptr() for chunk in memory]
        assert uploads[-1].tolist() == addresses
        assert transfer.moved[-3:] == [(list(range(6)), addresses, layer) for layer in (10, 11, 13)]
        part = groups()[0].pieces[0].part(1, 2)
        assert mover.move(part, memory, 0, gather=True)
        assert transfer.moved[-1] == ([2, 3], addresses[1:2], 0)
    assert [len(table) for table in uploads] == [3, 1, 3, 1]


@pytest.mark.parametrize(("pinned", "aligned"), [(False, True), (True, False)])
def test_what_kernels_do_not_reach_is_left_to_staging(pinned: bool, aligned: bool):
    transfer = Transfer(aligned)
    mover, (group, *_) = kernels(transfer, pinned=pinned), groups()
    assert not mover.suits(group.pieces, chunks())
    assert not mover.move(group.pieces[0], chunks(), 0, gather=False)
    assert transfer.moved == []


@pytest.mark.parametrize(
    ("numbers", "moved", "suits"),
    [
        ({}, True, True),
        ({"direct_bytes": 8}, False, True),
        ({"direct_bytes_idle": 8}, True, True),  # small enough for one launch
        ({"direct_bytes_idle": 8, "direct_launch_bytes": 47}, True, False),
        ({"direct_bytes_idle": 8, "direct_launch_bytes": 48}, True, True),
        ({"direct_bytes_idle": 9, "direct_launch_bytes": 47}, True, True),
    ],
)
def test_large_segments_are_left_to_the_copy_engine(numbers, moved, suits):
    """Here of 8 bytes, six of them in a group."""
    (group, *_), memory = groups(), chunks()
    mover = kernels(Transfer())
    with tuned(**numbers):
        assert mover.suits(group.pieces, memory) is suits
        assert mover.move(group.pieces[0], memory, 0, gather=False) is moved
        assert mover.move(group.pieces[0], memory, 0, gather=False, idle=True)
