"""What differs between devices, each with its reason; nothing else branches on one.

cpu     has no streams: every operation is done when it returns, and engine memory and
        host memory are the same memory, so there is nothing to stage.
others  (xpu, cuda, ...) run asynchronously in streams, through device-generic PyTorch,
        and gather and scatter with a Triton kernel where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lmcache_xpu.transfer import pool_memory
from lmcache_xpu.transfer.addresses import address_table

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

_NO_STREAM = nullcontext()


class Event:
    """A point in a stream that other streams can wait for; on CPU only a point in time.

    Args:
        device: of the stream.
        timed: `seconds_until` will be called.
    """

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        on_host = is_host(device)
        self._event = None if on_host else torch.Event(device=device, enable_timing=timed)
        self._at = 0.0

    def record(self, stream: SideStream | None = None) -> None:
        """Put the event at the end of a stream; of the current one if `stream` is None."""
        if self._event is not None:
            self._event.record(None if stream is None else stream.handle)
        else:
            self._at = time.perf_counter()

    def wait(self, stream: SideStream | None = None) -> None:
        """Let a stream wait for the event, or the current one; this thread does not wait."""
        if self._event is not None:
            self._event.wait(None if stream is None else stream.handle)

    def synchronize(self) -> None:
        """Wait on this thread until the device has reached the event."""
        if self._event is not None:
            self._event.synchronize()

    def reached(self) -> bool:
        """Whether the device has reached the event."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: Event) -> float:
        """Return the time from this event to a later one, both timed and reached."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return self._event.elapsed_time(later._event) / 1e3


class SideStream:
    """A stream beside the engine's own, on one device.

    Args:
        device: of the engine.
        urgent: its operations go before the engine's. Right for short kernels: one of the
            engine's may fill the device for milliseconds, and what waits for it would keep the
            link idle meanwhile. Copies gain nothing from it (measured on an H200), and the
            engine has some of its own.
    """

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._device = device
        priority = -1 if urgent else 0
        self.handle = None if is_host(device) else torch.Stream(device=device, priority=priority)

    def current(self) -> AbstractContextManager[object]:
        """Make this the current stream, in which operations are enqueued."""
        return _NO_STREAM if self.handle is None else self.handle

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


def register_host(address: int, size: int, device: torch.device) -> bool:
    """Pin memory that is allocated already, `size` bytes at `address`.

    Returns whether that worked.

    The drivers have no common call for it: CUDA's is in its runtime, XPU's comes with vLLM. Without
    it copies go by way of pinned memory, so no error in it ends the engine.
    """
    register = {"cuda": _cuda_register, "xpu": _xpu_register}.get(device.type)
    try:
        return register is not None and register(address, size)
    except Exception as error:  # whatever a driver or another version of the call raises
        logger.warning(
            "%s can't pin memory: %s: %s (docs: troubleshooting#not-pinned)",
            device,
            type(error).__name__,
            error,
        )
        return False


def unregister_host(address: int, device: torch.device) -> None:
    """Undo `register_host`, before the memory goes; waits for nothing that copies from it.

    No error in it ends the engine: the memory then stays until the process ends.
    """
    try:
        if device.type == "cuda":
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # as above
            runtime.cudaHostUnregister(address)
        elif device.type == "xpu":
            unregister = getattr(torch.ops._C, "xpu_host_unregister", None)
            if unregister is not None:
                takes_tensor = str(unregister.default._schema.arguments[0].type) == "Tensor"
                table = address_table([address]).view(torch.uint64)
                unregister(table if takes_tensor else address)
    except Exception as error:  # whatever a driver or another version of the call raises
        logger.warning(
            "%s can't give back pinned memory: %s: %s (docs: troubleshooting#not-pinned)",
            device,
            type(error).__name__,
            error,
        )


def _cuda_register(address: int, size: int) -> bool:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
    return int(runtime.cudaHostRegister(address, size, 0)) == 0


def _xpu_register(address: int, size: int) -> bool:
    """Pin memory by vllm-xpu-kernels' operation, of which there are two.

    The operation of 0.1.15 and 0.1.16 takes a number. The next one (csrc/utils/host_register.cpp)
    takes a tensor of one uint64, because a number of torch's is signed.
    """
    register = getattr(torch.ops._C, "xpu_host_register", None)
    if register is None:
        return False
    if str(register.default._schema.arguments[0].type) == "Tensor":
        return bool(register(address_table([address]).view(torch.uint64), size))
    return bool(register(address, size))


def most_pinned(device: torch.device) -> int | None:
    """Return the bytes of the largest pinned allocation to ask for; None where nothing limits it.

    On XPU PyTorch and the driver do (see `pool_memory`). For CUDA LMCache asks the driver itself,
    which neither rounds nor limits, and the host pins nothing.
    """
    if device.type != "xpu":
        return None
    return pool_memory.limit(torch.xpu.get_device_properties(device).total_memory)


def batched_copy(
    device: torch.device,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """Return vLLM's operation that enqueues many copies at once; None where it does not help.

    It takes sources, targets (addresses) and sizes in bytes, `[n]` int64 on the host each, and
    enqueues in the current stream. On CUDA the driver takes them as one: measured on an H200, 1 MiB
    each, 54.5 GB/s and 1 microsecond of the caller's time instead of 41.4 and 17. XPU's operation
    of that name first copies what the host has on the host (vllm-xpu-kernels, csrc/utils/
    mem_cpy.cpp), so it is not used.
    """
    if device.type != "cuda":
        return None
    return getattr(torch.ops._C_cache_ops, "swap_blocks_batch", None)


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return not is_host(device) and importlib.util.find_spec("triton") is not None
