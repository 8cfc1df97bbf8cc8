"""The imitated Intel GPU itself; `intel` says what it is for and gives it to tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from support import caches
from support.imitated_streams import Order
from support.races import Actor, Memory, bytes_of
from torch.overrides import TorchFunctionMode

XPU = torch.device("xpu:0")
ON_HOST = caches.DEVICE == "cpu"
REAL = torch.device("cpu") if ON_HOST else torch.device(caches.DEVICE.partition(":")[0], 0)
OFFSET = 0xFFFF_8000_0000_0000  # the least that puts every address of a process above 2**63

_READ = {"equal", "tolist", "item", "__bool__", "__int__", "__float__", "numpy"}
_COPIES = {"copy_", "_foreach_copy_", "__getitem__", "__setitem__"}  # may mix devices
_BLIND = ("empty", "_like", "new_", "set_")  # look at no bytes of what they are given


@dataclass(frozen=True)
class Machine:
    """An Intel GPU's host: what LMCache's memory is, and whether kernels may address the host's."""

    name: str
    memory: Literal["pinned", "registered", "pageable"]
    kernels: bool

    def __str__(self) -> str:
        return self.name


class IntelTensor(torch.Tensor):
    """Memory of the GPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if GPU.here is None:
            return super().__torch_function__(func, types, args, kwargs or {})
        return GPU.here.call(func, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:  # PyTorch wants a stream of its own
        if not ON_HOST:
            super().record_stream(stream)


class Mode(TorchFunctionMode):
    """Makes tensors on "xpu" possible, and sees what the host does with its own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return GPU.here.call(func, args, kwargs or {})


class GPU(Order):
    """The device.

    Args:
        machine: see there.
    """

    here: GPU

    def __init__(self, machine: Machine) -> None:
        super().__init__(streams=ON_HOST)
        self.machine = machine
        self.faults: list[str] = []
        self.registered: list[range] = []
        self._pinned: list[range] = []
        self._memory = Memory()
        self._own = {
            "device": self._device,
            "data_ptr": self._data_ptr,
            "is_pinned": self._is_pinned,
            "pin_memory": self._pin_memory,
            "cpu": self._cpu,
            "to": self._to,
            "copy_": self._copy,
            "_foreach_copy_": self._foreach_copy,
            "__iter__": self._iter,
        }

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that memory of the host was allocated pinned."""
        storage = tensor.untyped_storage()
        self._pinned.append(range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        self._memory.add(tensor)
        return tensor

    def register(self, address: int, size: int) -> bool:
        """vLLM's operation."""
        self.registered.append(range(address, address + size))
        return True

    def fault(self, what: str) -> None:
        """What the device would be lost by, or bytes be wrong by."""
        self.faults.append(what)
        raise RuntimeError(f"UR_RESULT_ERROR_DEVICE_LOST: {what}")

    # What PyTorch does.

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name == "__get__":
                name = func.__self__.__name__  # of a property
            own = self._own.get(name)
            return own(func, *args, **kwargs) if own else self._other(name, func, args, kwargs)

    def _device(self, func: Any, tensor: torch.Tensor) -> torch.device:
        return XPU if _there(tensor) else func(tensor)

    def _data_ptr(self, func: Any, tensor: torch.Tensor) -> int:
        return func(tensor) + (OFFSET if _there(tensor) else 0)

    def _is_pinned(self, func: Any, tensor: torch.Tensor) -> bool:
        if not ON_HOST:
            return func(tensor)
        return not _there(tensor) and any(tensor.data_ptr() in part for part in self._pinned)

    def _pin_memory(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        return self.pin(tensor.clone()) if ON_HOST else func(tensor)

    def _cpu(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        return self._to(torch.Tensor.to, tensor, "cpu")

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        targets = [*args, kwargs.pop("device", None)]
        devices = [
            torch.device(argument)
            for argument in targets
            if isinstance(argument, str | torch.device)
        ]
        rest = [argument for argument in args if not isinstance(argument, str | torch.device)]
        there = devices[0].type == XPU.type if devices else _there(tensor)
        if there == _there(tensor):
            return self._other("to", func, [tensor, *rest], kwargs) if rest or kwargs else tensor
        new = func(tensor, REAL if there else "cpu", *rest, **kwargs, copy=True)
        new = self._wrapped(new) if there else new
        self._copied(new, tensor, non_blocking=kwargs.get("non_blocking", False))
        return new

    def _copy(
        self, func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        func(target, source, non_blocking)
        self._copied(target, source, non_blocking=non_blocking)
        return target

    def _foreach_copy(
        self,
        func: Any,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        non_blocking: bool = False,
    ) -> None:
        func(targets, sources, non_blocking)
        for target, source in zip(targets, sources, strict=True):
            self._copied(target, source, non_blocking=non_blocking)

    def _iter(self, func: Any, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter(self._wrapped(tensor.unbind(0)) if _there(tensor) else tensor.unbind(0))

    def _other(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors([args, kwargs])
        there = any(map(_there, tensors))
        if (device := kwargs.get("device")) is not None:
            there = torch.device(device).type == XPU.type
            kwargs["device"] = REAL if there else device
        elif there and name not in _COPIES and any(not _there(t) and t.dim() for t in tensors):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        pinned = ON_HOST and kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self.pin(result)
        if there:
            result = self._wrapped(result)
        if ON_HOST:
            self._note(name, args, kwargs, tensors, result, there=there)
        return result

    def _wrapped(self, result: Any) -> Any:
        if type(result) in (tuple, list):
            return type(result)(map(self._wrapped, result))
        if type(result) is not torch.Tensor:
            return result
        if ON_HOST:
            self._memory.add(result)
        return result.as_subclass(IntelTensor)

    # Who does what when.

    def _note(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        arguments: list[torch.Tensor],
        result: Any,
        *,
        there: bool,
    ) -> None:
        written = _tensors(kwargs.get("out"))
        if name.endswith("_") and not name.endswith("__") and name != "set_":
            written += _tensors(args[0])
        elif name == "__setitem__":
            part = args[0][args[1]]
            shared = part.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
            written.append(part if shared else args[0])
        storages = {tensor.untyped_storage().data_ptr() for tensor in arguments}
        results = _tensors(result)
        fresh = [t for t in results if t.untyped_storage().data_ptr() not in storages]
        reads = name in _READ or (bool(fresh or written) and not any(b in name for b in _BLIND))
        actor = self.launch() if there else self.host
        for tensor in arguments if reads else ():
            if not any(tensor is target for target in written) and name != "__setitem__":
                self._access(actor, tensor, write=False)
        for tensor in (*written, *(() if "empty" in name else fresh)):
            self._access(actor, tensor, write=True)
        if there and name in _READ:
            self.host.after(actor.clock)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        if not ON_HOST:
            return
        if not (_there(target) or _there(source)):
            self._access(self.host, source, write=False)
            self._access(self.host, target, write=True)
            return
        # As torch-xpu-ops: what is not pinned is copied on the host first, on its way there.
        at_once = not _there(source) and not (
            non_blocking and self._is_pinned(torch.Tensor.is_pinned, source)
        )
        if at_once:
            self._access(self.host, source, write=False)
        actor = self.launch()
        for tensor, write in ((source, False), (target, True)):
            self._memory.add(tensor)
            if write or not at_once:
                self._access(actor, tensor, write=write)
        if not non_blocking:
            self.host.after(actor.clock)

    def _access(self, actor: Actor, tensor: torch.Tensor, *, write: bool) -> None:
        allocation = self._memory.of(tensor)
        if allocation is not None and tensor.numel():
            race = allocation.access(actor, bytes_of(tensor), write=write)
            if race is not None:
                self._race(actor, race, write=write)

    def _race(self, actor: Actor, other: int, *, write: bool) -> None:
        verb = "writes" if write else "reads"
        self.fault(f"{actor.name} {verb} without a wait for {self.actors[other].name}")

    def kernel(self, addresses: np.ndarray, size: int, *, write: bool) -> None:
        """Words of some size that a kernel reads or writes, at addresses of the device."""
        high = addresses >= np.uint64(2**63)
        for address in np.unique(addresses[~high]).tolist():
            if not self.machine.kernels:
                self.fault("a kernel addresses memory of the host")
            if not any(address in part for part in self._pinned):
                self.fault("a kernel addresses memory that was not allocated pinned")
        for allocation, where in self._memory.places(real_addresses(addresses), size):
            if allocation is None:
                self.fault("a kernel leaves its memory")
            actor = self.launch()
            race = allocation.access(actor, where, write=write)
            if race is not None:
                self._race(actor, race, write=write)


def real_addresses(addresses: np.ndarray) -> np.ndarray:
    """Those of this machine."""
    high = addresses >= np.uint64(2**63)
    return np.where(high, addresses - np.uint64(OFFSET), addresses)


def _there(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, IntelTensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [tensor for part in value for tensor in _tensors(part)]
        if isinstance(value, list | tuple)
        else []
    )
