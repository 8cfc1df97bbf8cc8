"""What differs between devices, each with its reason.

A CPU has no streams: every operation is done when it returns. Engine memory is host memory there,
so nothing is staged. Others run asynchronously in streams, and gather and scatter with a Triton
kernel where Triton is installed.
"""

from __future__ import annotations

import enum
import importlib.util
import logging
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from lmcache_xpu.transfer import pool_memory

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class Event:
    """A point in a stream of a device that others can wait for; on CPU it is always reached."""

    def __init__(self, device: torch.device) -> None:
        self._event = None if is_host(device) else torch.Event(device=device)

    def record(self, stream: SideStream | None = None) -> None:
        """Put the event at the end of a stream; None for the current one."""
        if self._event is not None:
            self._event.record(None if stream is None else stream.handle)

    def wait(self, stream: SideStream | None = None) -> None:
        """Let a stream wait for the event, None for the current one; this thread does not wait."""
        if self._event is not None:
            self._event.wait(None if stream is None else stream.handle)

    def synchronize(self) -> None:
        """Wait on this thread until the device has reached the event."""
        if self._event is not None:
            self._event.synchronize()

    def reached(self) -> bool:
        """Whether the device has reached the event."""
        return self._event is None or self._event.query()


def event_at(device: torch.device, stream: SideStream | None = None) -> Event:
    """Return an event at the end of a stream of a device; None for the current one."""
    event = Event(device)
    event.record(stream)
    return event


class Pinning(enum.IntEnum):
    """How an allocation of host memory is pinned."""

    NONE = 0
    REGISTERED = 1  # after it was allocated
    ALLOCATED = 2  # from the beginning


class StoreHandle(NamedTuple):
    """When a store has read the engine's blocks, and when host memory is complete."""

    gathered: Event
    done: Event


class SideStream:
    """A stream beside the engine's own, on one device.

    If it is urgent, its operations go before the engine's. That is right for short kernels, which
    would else wait while the link is idle. Copies gain nothing from it.
    """

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._device = device
        priority = -1 if urgent else 0
        self.handle = None if is_host(device) else torch.Stream(device=device, priority=priority)

    def current(self) -> AbstractContextManager[object]:
        """Make this the current stream, in which operations are enqueued."""
        return nullcontext() if self.handle is None else self.handle

    def reads(self, *tensors: torch.Tensor | None) -> None:
        """Keep memory that another stream made until what is enqueued here has read it."""
        for tensor in tensors:
            if self.handle is not None and tensor is not None:
                tensor.record_stream(self.handle)

    def after_engine(self) -> None:
        """Order what follows here after what the engine's current stream holds now."""
        if self.handle is not None:
            self.handle.wait_stream(torch.accelerator.current_stream(self._device))


def is_host(device: torch.device) -> bool:
    """Whether the engine's memory and LMCache's host memory are the same memory."""
    return device.type == "cpu"


def address_table(addresses: Sequence[int]) -> torch.Tensor:
    """Return addresses as `[n]` int64 on the host, those from 2**63 on as two's complement.

    An Intel GPU's lie at the top of the 64-bit space, where a signed number would overflow. Kernels
    and drivers take the same 64 bits as a pointer.

    Raises:
        OverflowError: a number that is no address: negative, or of more than 64 bits.
    """
    if not addresses:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("Q", addresses), dtype=torch.int64)


def register_host(address: int, size: int, device: torch.device) -> bool:
    """Pin `size` bytes at `address` that are allocated already; return whether that worked."""
    return _host_call("pin memory", "Register", device, address, size)


def unregister_host(address: int, device: torch.device) -> None:
    """Undo `register_host`, if that works, before the memory is freed; waits for no copy."""
    _host_call("give back pinned memory", "Unregister", device, address)


def _host_call(action: str, name: str, device: torch.device, address: int, *size: int) -> bool:
    """Call CUDA's runtime, or an operation of vllm-xpu-kernels; False if there is none, or fails.

    No error in it ends the engine: copies go through other pinned memory, or memory stays pinned.
    """
    try:
        if device.type == "cuda":
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            flags = (0,) * len(size)
            return int(getattr(runtime, f"cudaHost{name}")(address, *size, *flags)) == 0
        operation = getattr(torch.ops._C, f"xpu_host_{name.lower()}", None)
        if device.type != "xpu" or operation is None:
            return False
        # Up to 0.1.16 it takes a number, then (csrc/utils/host_register.cpp) a tensor of a uint64.
        if str(operation.default._schema.arguments[0].type) == "Tensor":
            return bool(operation(address_table([address]).view(torch.uint64), *size))
        return bool(operation(address, *size))
    except Exception as error:  # whatever a driver or another version of the call raises
        logger.warning(
            "%s can't %s: %s: %s (docs: troubleshooting#not-pinned)",
            *(device, action, type(error).__name__, error),
        )
        return False


def kernels_need(device: torch.device) -> Pinning:
    """Return how host memory must be pinned for kernels that address it.

    CUDA maps memory that `register_host` pins into the device's address space. XPU's call prepares
    it for copies only (SYCL's `prepare_for_device_copy`): kernels may address what was allocated
    pinned, and nothing else.
    """
    return Pinning.ALLOCATED if device.type == "xpu" else Pinning.REGISTERED


def most_pinned(device: torch.device) -> int | None:
    """Return the bytes of the largest pinned allocation to ask for; None but for XPU's driver."""
    if device.type != "xpu":
        return None
    return pool_memory.limit(torch.xpu.get_device_properties(device).total_memory)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, copied in the current stream; waits for nothing.

    From pageable memory the copy would wait for all of the stream. PyTorch keeps the pinned memory
    until the copy is done, and reuses it.
    """
    if is_host(device):
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return not is_host(device) and importlib.util.find_spec("triton") is not None
