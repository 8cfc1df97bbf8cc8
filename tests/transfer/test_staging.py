"""Staging: the way of an accelerator, taken on the host too, with buffers of all sizes."""

from __future__ import annotations

import logging

import pytest
import torch
from support.caches import DEVICE, Spec, bits, build
from support.imitation import GPU, Machine
from support.intel import MACHINES, on_machines
from support.intel import machine as machine  # a fixture

from lmcache_xpu.errors import SettingsError, TransferError
from lmcache_xpu.transfer import host_copies
from lmcache_xpu.transfer.host_copies import SMALLEST_STAGING_BYTES, HostCopies
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostFormat, HostMemory
from lmcache_xpu.transfer.slots import RequestRows, request_rows
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.tuning import TUNING

SPANS = ((0, 4), (4, 8), (8, 11))
HERE = [16, 17, 18, 19, 4, 5, 6, 7, 12, 13, 14]
THERE = [0, 1, 2, 3, 20, 21, -1, 23, 8, 9, 10]  # one token has no place
ONE_LAYER = 4 * 2 * 16 * 2  # bytes of a chunk of the spec below
POOL_BYTES = TUNING.pool_bytes


def stager_of(cache, buffer: int) -> Stager:
    view = PagedView.from_engine(cache.engine, cache.geometry, num_layers=cache.spec.layers)
    stager = Stager(view, SMALLEST_STAGING_BYTES, in_place=False)
    stager.buffer_bytes = buffer  # smaller than what a real one may be
    stager.follow_engine()
    return stager


def rows(stager: Stager, numbers: list[int]) -> RequestRows:
    return request_rows(stager.view, torch.tensor(numbers), SPANS)


def host(cache, pinned: bool) -> list[torch.Tensor]:
    chunks = [cache.host(end - start) for start, end in SPANS]
    return [chunk.pin_memory() if pinned else chunk for chunk in chunks]


def flat(chunks: list[torch.Tensor]) -> HostMemory:
    return HostMemory(chunk.view(-1).view(torch.uint8) for chunk in chunks)


def moved(source, target, as_held=lambda token: token):
    wanted = target.twin()
    for plane in range(2):
        for layer in range(source.spec.layers):
            for here_slot, there_slot in zip(HERE, THERE, strict=True):
                if there_slot >= 0:
                    token = as_held(source.token(plane, layer, here_slot))
                    wanted.put(plane, layer, there_slot, token)
    return wanted.raw


PINNED = [False] if DEVICE == "cpu" else [False, True]


@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("buffer", [ONE_LAYER, 2 * ONE_LAYER, 3 * ONE_LAYER, 7 * ONE_LAYER])
@pytest.mark.parametrize("kind", ["BLHNC", "NB,2,BS,NH,HS"])
def test_a_round_trip_with_buffers_of_every_size(kind: str, buffer: int, pinned: bool):
    round_trip(kind, buffer, pinned=pinned)


@on_machines("buffer", here=(), there=(2 * ONE_LAYER, 7 * ONE_LAYER))
def test_a_round_trip_on_every_machine(machine: Machine, buffer: int):
    stager = round_trip("LBNHC", buffer, pinned=machine.memory == "pinned")
    assert stager.reaches_host is machine.kernels
    assert bool(GPU.here.registered) is (machine.memory == "registered")
    assert bool(stager._host._passing) is (machine.memory == "pageable")


def round_trip(kind: str, buffer: int, *, pinned: bool) -> Stager:
    source, target = build(Spec(kind)), build(Spec(kind))
    stager, form = stager_of(source, buffer), HostFormat(3, 2)
    memory = flat(host(source, pinned))
    stored = stager.store(stager.plan(form, rows(stager, HERE)), memory)
    stored.done.synchronize()
    wanted = moved(source, target)
    back = stager_of(target, buffer)
    plan = back.plan(form, rows(back, THERE), (0, 1))
    for group in plan.groups:
        done = back.load(group.pieces, memory)
    done.synchronize()
    assert torch.equal(bits(target.raw), bits(wanted))
    return back


def as_float8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


@MACHINES
@pytest.mark.parametrize("buffer", [ONE_LAYER // 2, 2 * ONE_LAYER])
def test_in_half_the_bytes_elements_are_rounded(buffer: int):
    """With buffers that hold one layer of a chunk, and several."""
    source, target = build(Spec("LBNHC")), build(Spec("LBNHC"))
    stager, back = stager_of(source, buffer), stager_of(target, buffer)
    for each in (stager, back):
        each.hold_float8(torch.bfloat16)
        assert not each.reaches_host
    whole, form = flat(host(source, pinned=DEVICE != "cpu")), HostFormat(3, 2)
    memory = HostMemory(chunk[: len(chunk) // 2] for chunk in whole)
    behind = [chunk[len(chunk) // 2 :].clone() for chunk in whole]
    stager.store(stager.plan(form, rows(stager, HERE)), memory).done.synchronize()
    before = [chunk.clone() for chunk in memory]
    wanted = moved(source, target, as_float8)
    back.load(back.plan(form, rows(back, THERE)), memory).synchronize()
    assert torch.equal(bits(target.raw), bits(wanted))
    # What came of float8 becomes the same float8, and rows without a place stay.
    back.store(back.plan(form, rows(back, THERE)), memory).done.synchronize()
    assert all(map(torch.equal, memory, before))
    assert all(torch.equal(a[len(a) // 2 :], b) for a, b in zip(whole, behind, strict=True))


@MACHINES
def test_a_store_keeps_the_rows_of_unmapped_tokens():
    cache = build(Spec("LBNHC"))
    stager, memory = stager_of(cache, 2 * ONE_LAYER), host(cache, pinned=DEVICE != "cpu")
    before = [chunk.clone() for chunk in memory]
    plan = stager.plan(HostFormat(3, 2), rows(stager, THERE))
    stager.store(plan, flat(memory)).done.synchronize()
    for plane in range(2):
        for layer in range(3):
            kept = memory[1][plane, layer, 2]
            assert torch.equal(bits(kept), bits(before[1][plane, layer, 2]))
            token = memory[1][plane, layer, 3]
            assert torch.equal(bits(token), bits(cache.token(plane, layer, 23)))


def test_a_layer_that_fits_no_buffer_is_an_error_before_anything_moves():
    cache = build(Spec("LBNHC"))
    stager, memory = stager_of(cache, ONE_LAYER - 1), host(cache, False)
    before = cache.raw.clone()
    with pytest.raises(TransferError, match="raise staging_mib"):
        stager.load(stager.plan(HostFormat(3, 2), rows(stager, HERE)), flat(memory))
    assert torch.equal(bits(cache.raw), bits(before))


@pytest.mark.parametrize("free", [2**23, 2**20])
def test_less_memory_than_asked_for(free: int, monkeypatch, caplog):
    """A smaller step where there is some, a clear error at start where there is none."""
    real, taken = torch.empty, []

    def empty(size, *args, **options):
        if isinstance(size, int) and size >= 2**20 and not options.get("pin_memory"):
            if sum(taken) + size > free:
                taken.clear()
                raise torch.OutOfMemoryError("out of memory")
            taken.append(size)
        return real(size, *args, **options)

    cache = build(Spec("LBNHC"))
    view = PagedView.from_engine(cache.engine, cache.geometry, num_layers=3)
    monkeypatch.setattr(torch, "empty", empty)
    if free < SMALLEST_STAGING_BYTES:
        with pytest.raises(SettingsError, match="Lower memory_fraction"):
            Stager(view, 2**25, in_place=False)
        return
    with caplog.at_level(logging.WARNING):
        assert Stager(view, 2**25, in_place=False).buffer_bytes == free // 2
    assert "staging uses 8 MiB" in caplog.text


class Driver:
    """Pins what it is asked to, or refuses."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.asked: list[int] = []

    def __call__(self, address: int, size: int, device: torch.device) -> bool:
        self.asked.append(size)
        return self.answer


@pytest.mark.parametrize("answer", [True, False])
def test_a_pool_that_is_not_pinned_is_pinned_once_and_said_once(answer: bool, caplog, monkeypatch):
    monkeypatch.setattr(host_copies, "register_host", driver := Driver(answer))
    memory = HostCopies(torch.device(DEVICE))
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8)
    with caplog.at_level(logging.INFO):
        assert memory.pinned(HostMemory([pool[:5], pool[7:9]])) is answer
        assert memory.pinned(HostMemory([pool[100:]])) is answer
    assert driver.asked == [POOL_BYTES]
    assert len(caplog.records) == 1
    assert ("it is now" if answer else "other pinned memory") in caplog.text


def test_a_stager_pins_a_pool_before_it_is_used_and_none_on_the_host(monkeypatch):
    cache = build(Spec("LBNHC"))
    stager = stager_of(cache, ONE_LAYER)
    monkeypatch.setattr(host_copies, "register_host", driver := Driver(True))
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8)
    stager.pin(pool)
    assert stager._host.pinned(HostMemory([pool[:5]]))
    assert driver.asked == [POOL_BYTES]
    if DEVICE == "cpu":
        in_place = Stager(stager.view)
        in_place.pin(torch.empty(POOL_BYTES, dtype=torch.uint8))
        assert driver.asked == [POOL_BYTES]


def test_passing_memory_is_never_pinned(monkeypatch):
    """Its addresses are given to others, which would find them pinned."""
    monkeypatch.setattr(host_copies, "register_host", driver := Driver(True))
    memory = HostMemory([torch.empty(4096)])
    assert not HostCopies(torch.device(DEVICE)).pinned(memory)
    assert driver.asked == []


@MACHINES
def test_other_pinned_memory_brings_bytes_there_and_back():
    memory = HostCopies(torch.device(DEVICE))
    chunks = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 2, 40, 5, 1)]
    there = [torch.empty(chunk.shape, dtype=torch.uint8, device=DEVICE) for chunk in chunks]
    for target, chunk in zip(there, chunks, strict=True):
        memory.load(target, [chunk], pinned=False)
    back = [torch.zeros_like(chunk) for chunk in chunks]
    for target, source in zip(back, there, strict=True):
        memory.store([target], source, pinned=False)
    for target, chunk in zip(back, chunks, strict=True):
        assert torch.equal(target, chunk)
