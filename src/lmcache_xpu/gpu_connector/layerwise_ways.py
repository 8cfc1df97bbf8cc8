"""The two ways in which a layerwise transfer runs: overlapped with the engine, or step by step.

Overlapped, `InFlight` lets the engine wait for a load's layers and publishes what a store has
completed. Step by step, the steps of the connector's generator do: each lets the engine, or
LMCache, wait for the group before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.gpu_connector.load_pipeline import Finished, LoadPipeline
from lmcache_xpu.gpu_connector.registered_cache import LoadOwner
from lmcache_xpu.transfer.handles import StoreHandle, TransferHandle
from lmcache_xpu.transfer.staging import Stager


class OverlappedLoad:
    """A load that another enqueues, and whose memory it holds.

    Args:
        owner: `InFlight`, which hears of the engine's layers, or an `AsyncLoad`.
        pipeline: the load.
        finished: is told how many seconds it took.
    """

    def __init__(self, owner: LoadOwner, pipeline: LoadPipeline, finished: Finished) -> None:
        self._owner = owner
        self._pipeline = pipeline
        self._finished = finished

    def enqueue(self, memory_objs: Sequence[MemoryObj], first_layer: int) -> None:
        """Hold the memory of a group that the pipeline has; begin the load with the first one."""
        if first_layer == 0:
            self._owner.add_load(self._pipeline, memory_objs, self._finished)
        else:
            self._owner.hold(self._pipeline, memory_objs)

    def wait(self) -> None:
        """Leave it to the owner to wait for the last layers."""

    def close(self) -> None:
        """Leave it to the owner to let go of the memory."""


class SteppedLoad:
    """A load of which each step enqueues a group, and lets the engine wait for the one before.

    Args:
        pipeline: the load.
        stager: of the engine's KV cache.
        finished: is told how many seconds it took.
    """

    def __init__(self, pipeline: LoadPipeline, stager: Stager, finished: Finished) -> None:
        self._pipeline = pipeline
        self._stager = stager
        self._finished = finished
        # Each group's objects, with the number of the pipeline's layer groups up to theirs.
        self._groups: list[tuple[int, Sequence[MemoryObj]]] = []

    def enqueue(self, memory_objs: Sequence[MemoryObj], first_layer: int) -> None:
        """Enqueue a group that the pipeline has, and hold its memory until it is copied.

        LMCache lets go of it before the last step.
        """
        self._pipeline.after_layer(first_layer)
        for memory_obj in memory_objs:
            memory_obj.ref_count_up()
        self._groups.append((len(self._pipeline), memory_objs))
        self._pipeline.before_layer(first_layer - 1)

    def wait(self) -> None:
        """Let the engine's stream wait for the last layers."""
        self._pipeline.before_all()

    def close(self) -> None:
        """Wait on the host until everything is copied, and let go of its memory."""
        if not self._pipeline.waited_for():  # after an error a part may be on its way
            self._stager.fence().done.synchronize()
        for groups, memory_objs in self._groups:
            self._pipeline.synchronize(groups)
            for memory_obj in memory_objs:
                memory_obj.ref_count_down()
        self._finished(sum(handle.seconds() for handle in self._pipeline.handles()))


class OverlappedStore:
    """A store whose objects `InFlight` publishes when they are complete.

    Args:
        in_flight: protects the slots until they are read.
        slots: `[tokens]` on the host.
        finished: is told how many seconds the store took.
    """

    def __init__(self, in_flight: InFlight, slots: torch.Tensor, finished: Finished) -> None:
        self._in_flight = in_flight
        self._slots = slots
        self._finished = finished
        self._handles: list[TransferHandle] = []  # by group

    def add(self, memory_objs: Sequence[MemoryObj], stored: StoreHandle) -> None:
        """Take over a group that was enqueued."""
        self._handles.append(stored.transfer)
        self._in_flight.add_store(memory_objs, stored, self._slots)

    def close(self) -> None:
        """Leave it to `InFlight` to wait for the last group."""

    def finish(self) -> None:
        """Count the store when it is complete."""
        self._in_flight.release((), self._handles, self._finished)


class SteppedStore:
    """A store of which each step waits on the host for the group before: it is published next.

    Args:
        finished: is told how many seconds the store took.
    """

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self._handles: list[TransferHandle] = []  # by group

    def add(self, memory_objs: Sequence[MemoryObj], stored: StoreHandle) -> None:
        """Wait for the group before one that was enqueued."""
        self._handles.append(stored.transfer)
        for handle in self._handles[-2:-1]:
            handle.done.synchronize()

    def close(self) -> None:
        """Wait for the last group, also after an error."""
        for handle in self._handles[-1:]:
            handle.done.synchronize()

    def finish(self) -> None:
        """Count the store."""
        self._finished(sum(handle.seconds() for handle in self._handles))
