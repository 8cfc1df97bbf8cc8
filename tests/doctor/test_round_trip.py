"""The round trip of `lmcache-xpu doctor`: on this device, and with planted faults."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support import caches
from support.caches import DEVICE
from support.checks import said
from support.intel import MACHINES
from support.intel import machine as machine  # a fixture

from lmcache_xpu.doctor import round_trip
from lmcache_xpu.transfer.staging import Stager

HERE = DEVICE.partition(":")[0]
ABSENT = "cuda" if HERE == "xpu" else "xpu"


def test_chunks_come_back_on_this_machine():
    assert said(round_trip.check_transfer(HERE), "ok", "every byte")


@MACHINES
def test_chunks_come_back_on_an_intel_gpu(machine, monkeypatch):
    """Smaller ones: kernels are interpreted where there is no accelerator."""
    for name, size in (("LAYERS", 2), ("HEADS", 2), ("DIM", 32), ("BLOCKS", 12)):
        monkeypatch.setattr(round_trip, name, size)
    monkeypatch.setattr(round_trip, "CHUNK_TOKENS", 64)
    staged, direct = round_trip.round_trips(torch.device(caches.DEVICE))
    assert staged
    reached = DEVICE != "cpu" if machine is None else machine.kernels
    assert direct is (True if reached else None)


def test_a_device_that_is_not_here_is_not_tried():
    assert said(round_trip.check_transfer(ABSENT), "skip", f"no {ABSENT}")


def test_a_transfer_that_goes_wrong_is_seen(monkeypatch):
    load = Stager.load

    def shifted(self, plan, memory, *args, **kwargs):
        return load(self, plan, type(memory)(memory[::-1]), *args, **kwargs)

    monkeypatch.setattr(Stager, "load", shifted)
    check = round_trip.check_transfer(HERE)
    assert said(check, "fail", "other bytes", "staged", "offload=false")

    def refused(self, *args, **kwargs):
        raise RuntimeError("no events")

    monkeypatch.setattr(Stager, "store", refused)
    check = round_trip.check_transfer(HERE)
    assert said(check, "fail", "RuntimeError: no events")


@pytest.mark.parametrize(
    ("direct", "outcome", "words"),
    [(None, "ok", "staged: every"), (True, "ok", "by a kernel"), (False, "fail", "by a kernel")],
)
def test_each_way_of_a_load_counts(direct, outcome, words, monkeypatch):
    monkeypatch.setattr(round_trip, "round_trips", lambda device: (True, direct))
    module = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert said(round_trip.check_transfer("xpu"), outcome, words)
