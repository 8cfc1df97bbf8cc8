"""An imitation of an Intel GPU: PyTorch gives the package what it would give on one.

Nothing of the package is replaced. Tensors on "xpu" are those of this machine's device, or of its
host, under another name, and PyTorch itself is told to

- give them addresses from 2**63 on, which kernels get as well;
- refuse what mixes the host's tensors with the device's, where it would there;
- let no kernel address memory of the host, or memory that was allocated pinned and no other;
- have vLLM's operation that registers memory for copies.

Without an accelerator streams and events are imitated too: they run nothing beside anything, but
note what they order (see `races`). A test in which something is not ordered, or in which a kernel
goes where it must not, fails. On an accelerator they are the real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import caches
from support.imitated_streams import Event, Order, Stream
from support.imitation import (
    GPU,
    OFFSET,
    ON_HOST,
    REAL,
    Machine,
    Mode,
    real_addresses,
)
from support.kernels import INTERPRET
from support.tuned import tuned

from lmcache_xpu.transfer import gather_scatter_triton

HERE = pytest.param(None, id="here")
INTEL = (
    Machine("xpu, unpinned memory", "pageable", kernels=False),
    Machine("xpu, registered memory", "registered", kernels=True),
    Machine("xpu, kernels read the host", "pinned", kernels=True),
)
MACHINES = pytest.mark.parametrize("machine", [HERE, *INTEL], indirect=True, ids=str)


def on_machines(name: str, here: Iterable[Any], there: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's cases here, and fewer of them on each machine: kernels are interpreted slowly."""
    cases = [
        *(pytest.param(None, case, id=str(case)) for case in here),
        *(
            pytest.param(machine, case, id=f"{case} on {machine}")
            for machine in INTEL
            for case in there
        ),
    ]
    return pytest.mark.parametrize(("machine", name), cases, indirect=["machine"])


KINDS_ON_MACHINES = on_machines("kind", caches.KINDS, ["LBNHC"])  # vLLM's layout on Intel GPUs


@pytest.fixture(autouse=True)
def machine(request, monkeypatch) -> Iterator[Machine | None]:
    """The machine of a test: this one, or an Intel GPU's where the test is parametrized so."""
    imitated = getattr(request, "param", None)
    if imitated is None:
        yield None
        return
    gpu = _imitate(imitated, monkeypatch)
    with torch.library._scoped_library("_C", "FRAGMENT") as library, Mode(), pools(imitated):
        if imitated.memory == "registered":
            library.define("xpu_host_register(int ptr, int n_bytes) -> bool")
            library.impl("xpu_host_register", gpu.register, "CompositeExplicitAutograd")
        yield imitated
    Order.here = None
    assert not gpu.faults


def pools(machine: Machine) -> AbstractContextManager[object]:
    """Where a pool has to be registered, the memory of one chunk is large enough for one."""
    return tuned(pool_bytes=1) if machine.memory == "registered" else nullcontext()


def _imitate(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> GPU:
    monkeypatch.setattr(caches, "DEVICE", "xpu")
    monkeypatch.setenv(
        gather_scatter_triton.KERNELS_READ_HOST_VARIABLE, "1" if machine.kernels else "0"
    )
    for variable, value in INTERPRET.items():
        monkeypatch.setenv(variable, value)
    gpu = GPU(machine)
    (_imitate_streams if ON_HOST else _rename_streams)(gpu, monkeypatch)
    (_interpret if ON_HOST else _translate)(gpu, monkeypatch)
    return gpu


def _imitate_streams(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: gpu.streams[-1])
    monkeypatch.setattr(torch.accelerator, "synchronize", gpu.synchronize)
    wait = Future.result

    def joined(self: Future, timeout: float | None = None) -> Any:
        result = wait(self, timeout)
        gpu.join()
        return result

    monkeypatch.setattr(Future, "result", joined)


def _rename_streams(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's own under the GPU's name."""
    current = torch.accelerator.current_stream
    monkeypatch.setattr(torch, "Event", functools.partial(_on_real, torch.Event))
    monkeypatch.setattr(torch, "Stream", functools.partial(_on_real, torch.Stream))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: current(REAL))


def _on_real(make: Any, device: object = None, **more: Any) -> Any:
    return make(device=REAL, **more)


def _interpret(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter compute with the GPU's addresses, and look where they mean."""
    from triton.runtime import interpreter

    whole, launch = interpreter.interpreter_builder, interpreter.GridExecutor
    monkeypatch.setattr(whole, "options", replace(whole.options, sanitize_overflow=False))  # slow
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def there(pointers: Any, mask: Any, *, write: bool) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        gpu.kernel(pointers.data[mask.data], size, write=write)
        return interpreter.TensorHandle(real_addresses(pointers.data), pointers.dtype)

    def loaded(self, pointers, mask, *rest):
        return load(self, there(pointers, mask, write=False), mask, *rest)

    def stored(self, pointers, value, mask, *rest):
        return store(self, there(pointers, mask, write=True), value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", loaded)
    monkeypatch.setattr(builder, "create_masked_store", stored)
    # It would copy its arguments to where the host could read them, and back.
    monkeypatch.setattr(launch, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    monkeypatch.setattr(launch, "_restore_args_dev", lambda self, *args: None)


def _translate(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the accelerator's kernel have the tables with its own addresses."""
    monkeypatch.setattr(
        gather_scatter_triton, "_paged_copy", _Translated(gpu, gather_scatter_triton._paged_copy)
    )


class _Translated:
    """The kernel with addresses of this machine in place of the GPU's."""

    def __init__(self, gpu: GPU, kernel: Any) -> None:
        self._gpu, self._kernel, self.arg_names = gpu, kernel, kernel.arg_names
        self._tables = [kernel.arg_names.index(name) for name in ("plane_ptr", "table_ptr")]

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **constants: Any) -> None:
        if constants["TABLE"] and not self._gpu.machine.kernels:
            self._gpu.fault("a kernel addresses memory of the host")
        with torch._C.DisableTorchFunction():
            arguments = [
                arg.as_subclass(torch.Tensor) if isinstance(arg, torch.Tensor) else arg
                for arg in args
            ]
            for at in self._tables:
                table = arguments[at]
                arguments[at] = torch.where(table < 0, table + (2**64 - OFFSET), table)
            self._kernel[grid](*arguments, **constants)
