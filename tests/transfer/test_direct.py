"""Kernels that read host memory: what they need, and how often addresses are uploaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.plans import ROW, plan
from support.tuned import tuned

from lmcache_xpu.transfer import staging
from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostMemory, LayerGroup
from lmcache_xpu.transfer.staging import Stager


class Transfer:
    """Notes what it is told to move."""

    def __init__(self, aligned: bool = True) -> None:
        self.moved: list[tuple[list[int], list[int], int]] = []
        self._aligned = aligned

    def warm_up(self) -> bool:
        return True

    def aligned(self, addresses: torch.Tensor) -> bool:
        return self._aligned

    def gather(self, rows: Any, form: Any, layer: int, **host: Any) -> None:
        if host:  # else it is staged
            self.moved.append((rows.engine.tolist(), host["table"].tolist(), layer))

    scatter = gather


@pytest.fixture
def stager_of(monkeypatch):
    def make(transfer: Transfer, *, pinned: bool = True) -> Stager:
        monkeypatch.setattr(staging, "transfer_of", lambda view: transfer)
        view = PagedView(tensors=((torch.zeros(7, 1, 1, ROW, dtype=torch.uint8),),) * 14)
        stager = Stager(view, SMALLEST_STAGING_BYTES, in_place=False)
        monkeypatch.setattr(stager._host, "pinned", lambda memory, at_least=None: pinned)
        return stager

    return make


def chunks(count: int = 3) -> HostMemory:
    return HostMemory([torch.zeros(2 * 4 * 2 * 4, dtype=torch.uint8) for _ in range(count)])


def groups() -> list[LayerGroup]:
    return plan([2, 2, 2], 4, 0, starts=(0, 1, 3)).groups


def test_addresses_are_uploaded_once_for_all_layers_and_anew_for_other_memory(
    monkeypatch, stager_of
):
    uploads: list[torch.Tensor] = []

    def upload(addresses: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploads.append(addresses)
        return addresses

    monkeypatch.setattr(staging, "upload", upload)
    mover = stager_of(transfer := Transfer())
    for memory in (chunks(), chunks()):
        for group in groups():
            assert mover.needs_no_copies(group.pieces, memory)
            mover.load(group.pieces, memory, 10)
        addresses = [chunk.data_ptr() for chunk in memory]
        assert uploads[-1].tolist() == addresses
        assert transfer.moved[-3:] == [(list(range(6)), addresses, layer) for layer in (10, 11, 13)]
        part = dataclasses.replace(groups()[0].pieces[0], chunks=range(1, 2))
        mover.store([part], memory)
        assert transfer.moved[-1] == ([2, 3], addresses[1:2], 0)
    assert [len(table) for table in uploads] == [3, 1, 3, 1]


@pytest.mark.parametrize(("pinned", "aligned"), [(False, True), (True, False)])
def test_what_kernels_do_not_reach_is_left_to_staging(pinned: bool, aligned: bool, stager_of):
    transfer = Transfer(aligned)
    mover, (group, *_) = stager_of(transfer, pinned=pinned), groups()
    assert not mover.needs_no_copies(group.pieces, chunks())
    mover.load(group.pieces, chunks())
    assert transfer.moved == []


@pytest.mark.parametrize(
    ("numbers", "moved", "suits"),
    [
        ({"direct_bytes": 9}, True, True),
        ({"direct_bytes": 8}, False, True),
        ({"direct_bytes_idle": 8}, True, True),  # small enough for one launch
        ({"direct_bytes_idle": 8, "direct_launch_bytes": 47}, True, False),
        ({"direct_bytes_idle": 8, "direct_launch_bytes": 48}, True, True),
        ({"direct_bytes_idle": 9, "direct_launch_bytes": 47}, True, True),
    ],
)
def test_large_segments_are_left_to_the_copy_engine(numbers, moved, suits, stager_of):
    """Here of 8 bytes, six of them in a group."""
    (group, *_), memory = groups(), chunks()
    mover = stager_of(transfer := Transfer())
    with tuned(**numbers):
        assert mover.needs_no_copies(group.pieces, memory) is suits
        mover.load(group.pieces, memory)
        assert bool(transfer.moved) is moved
        mover.load(group.pieces, memory, idle=True)
        assert len(transfer.moved) == moved + (moved or suits)
