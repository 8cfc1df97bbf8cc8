"""The Triton kernel: what is compiled when, and host memory that it addresses itself."""

from __future__ import annotations

import functools
import importlib
import logging

import pytest
import torch
from support.caches import KINDS, SCALED, Spec, bits, build, view_of
from support.intel import INTEL, MACHINES
from support.intel import machine as machine  # a fixture
from support.kernels import TritonTransfer, gather_scatter_triton, interpreter  # noqa: F401  # a fixture
from triton.runtime.jit import mangle_type

from lmcache_xpu.transfer import staging
from lmcache_xpu.transfer.gather_scatter import TorchTransfer
from lmcache_xpu.transfer.layout import Geometry
from lmcache_xpu.transfer.paged_view import PagedView
from lmcache_xpu.transfer.plan import HostFormat, Plan
from lmcache_xpu.transfer.slots import request_rows


@pytest.mark.parametrize("transfer", [TorchTransfer, TritonTransfer])
@pytest.mark.parametrize("kind", KINDS)
def test_warming_up_leaves_the_cache_as_it_is(
    kind: str, transfer: type[TorchTransfer | TritonTransfer]
):
    cache = build(Spec(kind, torch.uint8 if kind in SCALED else torch.bfloat16))
    before = cache.raw.clone()
    mover = transfer.of(view_of(cache))
    assert mover.warm_up() is (transfer is TritonTransfer)
    assert torch.equal(bits(cache.raw), bits(before))


@MACHINES
def test_warming_up_tries_the_host_where_kernels_may_reach_it(machine):
    cache = build(Spec("LBNHC"))
    before = cache.raw.clone()
    assert TritonTransfer.of(view_of(cache)).warm_up() is (machine is None or machine.kernels)
    assert torch.equal(bits(cache.raw), bits(before))


FAULTS = {
    "nothing arrives": "other bytes arrived",
    "an error": "RuntimeError: no such address",
    "nothing is read": "other bytes were read",
    "an error in a read": "RuntimeError: no such address",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_host_memory_that_kernels_do_not_reach_is_staged(fault: str, monkeypatch, caplog):
    """Nothing of it may stay in the cache either."""
    cache = build(Spec("LBNHC"))
    before = cache.raw.clone()
    launch = TritonTransfer._launch
    reading = fault in ("nothing is read", "an error in a read")

    def launched(self, rows, chunk, *args, gather: bool, table=None) -> None:
        if table is None or (gather and reading):
            launch(self, rows, chunk, *args, gather=gather, table=table)
        elif not (gather or reading):
            pytest.fail("what never arrived is brought back")
        elif fault.startswith("an error"):
            launch(self, rows, chunk, *args, gather=gather, table=table)
            raise RuntimeError("no such address")

    monkeypatch.setattr(TritonTransfer, "_launch", launched)
    mover = TritonTransfer.of(view_of(cache))
    with caplog.at_level(logging.WARNING):
        assert not mover.warm_up()
    assert f"don't reach pinned host memory: {FAULTS[fault]}" in caplog.text
    assert torch.equal(bits(cache.raw), bits(before))
    monkeypatch.setattr(staging, "transfer_of", lambda view: mover)
    assert staging.Stager(view_of(cache), in_place=False).reaches_host is False


def test_the_switch_leaves_the_try_out(monkeypatch):
    monkeypatch.setenv(gather_scatter_triton.KERNELS_READ_HOST_VARIABLE, "0")
    launch = TritonTransfer._launch

    def launched(self, *args, gather: bool, table=None) -> None:
        assert table is None, "a wrong address costs the device"
        launch(self, *args, gather=gather)

    monkeypatch.setattr(TritonTransfer, "_launch", launched)
    cache = build(Spec("LBNHC"))  # a transfer holds its addresses, and nothing else of it
    mover = TritonTransfer.of(view_of(cache))
    assert not mover.warm_up()


class Recorder:
    """Takes the kernel's place, and notes what Triton would compile it for.

    Integers by whether they are 1, and pointers and integers by whether 16 divides them, unless
    the kernel excludes them.
    """

    def __init__(self, kernel) -> None:
        self.names, self.seen = kernel.arg_names, set()
        options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
        self.any_value = set(options["do_not_specialize"])
        self.any_place = set(options["do_not_specialize_on_alignment"])

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **constants) -> None:
        launches = []
        for name, value in zip(self.names, args, strict=False):  # constants come by name
            if isinstance(value, torch.Tensor):
                launches.append((name, name in self.any_place or value.data_ptr() % 16 == 0))
            elif name in self.any_value:
                launches.append((name, value.bit_length() > 31))  # its type is still the value's
            else:
                launches.append((name, value == 1, value % 16 == 0))
        self.seen.add((tuple(launches), tuple(constants.items())))


@pytest.mark.parametrize("order", ["planes", "layers", "rows"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 64), (1, 80), (3, 20)])
def test_nothing_is_compiled_after_warming_up(heads: int, dim: int, order: str, monkeypatch):
    """Compiling takes half a second, and a first hit would wait for it."""
    module = importlib.import_module("lmcache_xpu.transfer.gather_scatter_triton")
    engine = [torch.zeros(2, 8, 16, heads, dim, dtype=torch.bfloat16) for _ in range(5)]
    geometry = Geometry(hidden=heads * dim, mla=False, kv_layout="NHD")
    view = PagedView.from_engine(engine, geometry, num_layers=5)
    mover = module.TritonTransfer.of(view)
    recorder = Recorder(module._paged_copy)
    monkeypatch.setattr(module, "_paged_copy", recorder)
    assert mover.warm_up()
    warmed = set(recorder.seen)
    assert len(warmed) >= 8  # in and out, with rows left out or not, staged or not
    for cached in (0, 5):
        made = request_rows(view, torch.arange(64), [(0, 32), (32, 64)], cached)
        for layers in (1, 2, 5):
            (piece,) = Plan(HostFormat(layers, 2, order), made, view.row_bytes, 0)
            whole = torch.zeros(2 * 2 * layers * 32 * view.row_bytes, dtype=torch.uint8)
            form = piece.staged(whole)
            for first in range(5 - layers + 1):
                for move in (mover.scatter, mover.gather):
                    move(made.chunks(0, 2), form, first)
                    table = torch.zeros(2, dtype=torch.int64)
                    move(made.chunks(0, 2), form, first, table=table)
    assert recorder.seen == warmed


@pytest.mark.parametrize("machine", INTEL[-1:], indirect=True, ids=str)
def test_addresses_come_to_the_kernel_as_pointers_or_in_tables(machine, monkeypatch):
    """Triton types an integer by its value, so an address among them would be unsigned."""
    module = importlib.import_module("lmcache_xpu.transfer.gather_scatter_triton")
    kernel, types, tables = module._paged_copy, set(), set()

    class Seen:
        def __getitem__(self, grid):
            return functools.partial(self.launch, grid)

        def launch(self, grid, *args, **constants) -> None:
            for name, value in zip(kernel.arg_names, args, strict=False):
                types.add((isinstance(value, torch.Tensor), mangle_type(value, specialize=True)))
                if isinstance(value, torch.Tensor):
                    assert value.data_ptr() >= 2**63
                if name in ("plane_ptr", "table_ptr"):
                    tables.update(value.tolist())
            kernel[grid](*args, **constants)

    monkeypatch.setattr(module, "_paged_copy", Seen())
    cache = build(Spec("LBNHC", tokens=64))
    assert TritonTransfer.of(view_of(cache)).warm_up()
    assert {kind for pointer, kind in types if pointer} == {"*i64"}
    assert {kind for pointer, kind in types if not pointer} <= {"i32", "constexpr"}
    planes = {plane.data_ptr() for layer in view_of(cache).tensors for plane in layer}
    assert {number % 2**64 for number in tables if number < 0} == planes
    assert len([number for number in tables if number >= 0]) == 1  # what the try reads and writes
