"""Transfers beside the engine's own work: loads ahead of its layers, stores behind its steps.

A load is enqueued in the order of the layers, group by group; the engine's stream waits for a
group only where it comes to the group's first layer. A store is enqueued behind the step that
computed it, and LMCache gets to publish it when it is complete. The order on the device is kept by
events; nothing here waits on the engine's thread.

    begin_step    blocks that this step writes anew wait until a store has read them
    add_load ...  enqueue the first layer
    before_layer  the engine's stream waits for this layer
    after_layer   enqueue the next ones
    end_step      nothing may be left to load
    add_store ..., publish
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.metrics import LOAD_CPU
from lmcache_xpu.plan import Plan
from lmcache_xpu.slots import blocks_of
from lmcache_xpu.staging import Moved, Stager, Stored

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

MOST_LAYERS = 2  # of a cut beside much computing
LEAST_LAYERS = 8  # of a cut that shrinks; smaller copies are slower

# Loaded tokens per token to compute from which on copying takes longer than computing. A guess:
# measured, 20 on an H200 and PCIe 5; more on devices that compute more slowly.
LOAD_BOUND = 32

AHEAD = 2  # cuts that are enqueued beyond the layer that the engine is at
POLL_S = 5e-4


class _Cut(NamedTuple):
    """Some layers of all chunks of a request: one of a plan's cuts."""

    plan: Plan
    memory: Sequence[torch.Tensor]
    first_layer: int  # of the memory
    number: int


class LayeredLoad:
    """The load of one request, cut by cut in the order of the layers.

    Args:
        stager: of the engine's KV cache.
        slots: those of the loaded tokens, for a report.
    """

    def __init__(self, stager: Stager, slots: torch.Tensor) -> None:
        self.slots = slots
        self._stager = stager
        self._cuts: list[_Cut] = []
        self._starts: list[int] = []  # first layer of each cut
        self._moved: list[Moved] = []  # by cut
        self._waited = 0  # cuts
        self._failed = False

    def add(self, plan: Plan, memory: Sequence[torch.Tensor], first_layer: int = 0) -> None:
        """Layers behind those that were added before.

        Args:
            plan: of the request's chunks.
            memory: one per chunk, in the plan's format.
            first_layer: of the engine's, the first one in `memory`.
        """
        for number, (start, _) in enumerate(plan.cuts):
            self._cuts.append(_Cut(plan, memory, first_layer, number))
            self._starts.append(first_layer + start)

    @contextmanager
    def enduring(self) -> Iterator[None]:
        """An error in a step of the load ends the load, not the engine's step."""
        try:
            yield
        except Exception as error:
            self._failed = True
            self._moved.append(self._stager.fence())  # a part of a cut may be on its way
            LOAD_CPU.failed(type(error).__name__)
            logger.exception("A load failed and is computed instead: %s", error)

    def start(self) -> None:
        """Enqueue the first layer."""
        self._enqueue(1)

    def before_layer(self, layer: int) -> None:
        """Let the current stream wait for a layer."""
        if self._failed:
            return
        cuts = bisect.bisect_right(self._starts, layer)
        if cuts > self._waited:
            self._enqueue(cuts)
            self._moved[cuts - 1].done.wait()
            self._waited = cuts

    def after_layer(self, layer: int) -> None:
        """Enqueue what comes next.

        Only now, when the layer's own work is enqueued: drivers take about a thousand copies and
        then let the caller wait.
        """
        if not self._failed:
            self._enqueue(bisect.bisect_right(self._starts, layer) + AHEAD)

    def before_all(self) -> None:
        """Enqueue what is left, and let the current stream wait for all that was enqueued."""
        for last in self._starts[-1:]:
            self.before_layer(last)
        if self._failed:
            self._moved[-1].done.wait()

    @property
    def waited_for(self) -> bool:
        """Whether the engine's stream waits for all of it."""
        return not self._failed and self._waited == len(self._starts)

    def moved(self) -> list[Moved]:
        """From the first copy to the last that was enqueued; nothing if none was."""
        return [Moved(self._moved[0].begun, self._moved[-1].done)] if self._moved else []

    def _enqueue(self, cuts: int) -> None:
        for at in range(len(self._moved), min(cuts, len(self._cuts))):
            plan, memory, first, number = self._cuts[at]
            # What the engine computes in this step waits for the first cut.
            self._moved.append(self._stager.load(plan, memory, first, number, alone=at == 0))


def layer_cuts(layers: int, *, much_to_compute: bool) -> list[int]:
    """The first layer of each cut.

    With much to compute beside the load, cuts of 1, 1, 2, 2, 2, ..., 1, 1 layers: the first comes
    early, and each is there by the time that the ones before it have been computed, also where
    copying takes about as long as computing (larger ones, which copy faster, make the engine wait).
    With little to compute the copies are what takes time: each cut is three quarters of what is
    left, so that most layers come in few large copies.
    """
    starts = [0]
    while starts[-1] < layers:
        left = layers - starts[-1]
        growing = min((len(starts) + 1) // 2, MOST_LAYERS, max(1, left // 2))
        shrinking = max(left - left // 4, min(left, LEAST_LAYERS))
        starts.append(starts[-1] + (growing if much_to_compute else shrinking))
    return starts[:-1]


Finished = Callable[[float], None]  # is told how many seconds a transfer took


class _Load(NamedTuple):
    load: LayeredLoad
    objs: list[MemoryObj]
    finished: Finished


@dataclass
class Overlap:
    """What a connector has under way. Called from the engine's worker thread alone.

    Args:
        block_tokens: tokens of a block, as the engine numbers blocks.
        loads: loads run beside the engine's layers; else they are complete when they return.
        stores: stores run beside the engine's next steps; else they are complete when they return.
    """

    block_tokens: int
    loads: bool = True
    stores: bool = True
    _tokens: int | None = field(default=None, init=False)  # that this step computes
    _loads: list[_Load] = field(default_factory=list, init=False)
    _reading: list[tuple[Stored, torch.Tensor]] = field(default_factory=list, init=False)
    _unpublished: dict[int, Moved] = field(default_factory=dict, init=False)  # by id of object
    _finisher: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "lmcache-xpu-finish"), init=False
    )

    def begin_step(self, written: frozenset[int] | None, tokens: int | None = None) -> None:
        """Protect blocks that a store has yet to read.

        Args:
            written: blocks that were given to a request since the last step, so that the engine
                may write them; None if that is not known.
            tokens: that this step computes; None if that is not known.
        """
        self._tokens = tokens
        self._reading = [item for item in self._reading if not item[0].gathered.reached()]
        if written == frozenset():
            return
        for stored, slots in self._reading:
            if written is None or not written.isdisjoint(blocks_of(slots, self.block_tokens)):
                stored.gathered.wait()

    def cuts(self, layers: int, tokens: int) -> list[int]:
        """How to cut a load of some tokens in this step; see `layer_cuts`."""
        much = self._tokens is None or self._tokens * LOAD_BOUND >= tokens
        return layer_cuts(layers, much_to_compute=much)

    def add_load(self, load: LayeredLoad, objs: Sequence[MemoryObj], finished: Finished) -> None:
        """Begin a load for this step. Its memory is held until it is complete, come what may."""
        self._loads.append(_Load(load, [], finished))
        self.hold(load, objs)
        with load.enduring():
            load.start()

    def hold(self, load: LayeredLoad, objs: Sequence[MemoryObj]) -> None:
        """Hold more memory for a load of this step."""
        for item in self._loads:
            if item.load is load:
                for obj in objs:
                    obj.ref_count_up()
                item.objs.extend(objs)

    def before_layer(self, layer: int) -> None:
        """Let the engine's stream wait for a layer of all loads."""
        for item in self._loads:
            with item.load.enduring():
                item.load.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        """Enqueue what comes after a layer that the engine has enqueued."""
        for item in self._loads:
            with item.load.enduring():
                item.load.after_layer(layer)

    def before_all(self) -> None:
        """Let the engine's stream wait for all layers, where it does not stop at each."""
        for item in self._loads:
            with item.load.enduring():
                item.load.before_all()

    def end_step(self) -> list[torch.Tensor]:
        """Let go of this step's loads; slots of those that the engine did not wait for."""
        missed = []
        loads, self._loads = self._loads, []
        for item in loads:
            if not item.load.waited_for:
                missed.append(item.load.slots)
            with item.load.enduring():
                item.load.before_all()
            item.load.before_all()  # also of one that failed just now
            finished = item.finished if item.load.waited_for else _not_counted
            self.release(item.objs, item.load.moved(), finished)
        return missed

    def release(
        self, objs: Sequence[MemoryObj], moved: Sequence[Moved], finished: Finished
    ) -> None:
        """Give up memory that is held for transfers, when these are done."""

        def end() -> None:
            for obj in objs:
                obj.ref_count_down()
            finished(sum(one.seconds() for one in moved))

        self._when(moved, end)

    def add_store(self, objs: Sequence[MemoryObj], stored: Stored, slots: torch.Tensor) -> None:
        """A store that was enqueued: `publish` waits for it.

        Args:
            objs: where it goes.
            stored: when.
            slots: on the host, those that are read until it is gathered.
        """
        self._reading.append((stored, slots))
        for obj in objs:
            self._unpublished[id(obj)] = stored.moved

    def publish(self, objs: Sequence[MemoryObj], put: Callable[[], None]) -> None:
        """Call `put` when these objects are complete: now, or later from another thread."""
        moves = {self._unpublished.pop(id(obj), None) for obj in objs}
        self._when([moved for moved in moves if moved is not None], put)

    def drain(self) -> None:
        """Wait until everything is complete and published."""
        self._finisher.submit(lambda: None).result()

    def _when(self, moves: Sequence[Moved], action: Callable[[], None]) -> None:
        if all(moved.done.reached() for moved in moves):
            action()
        else:
            self._finisher.submit(_finish, moves, action)


def _not_counted(seconds: float) -> None:
    """Of a load that failed."""


def _finish(moves: Sequence[Moved], action: Callable[[], None]) -> None:
    try:
        for moved in moves:
            # Not synchronize(): beside it, another thread's launches took several times as long.
            while not moved.done.reached():
                time.sleep(POLL_S)
        with torch.inference_mode():
            action()
    except Exception:  # whatever it is: this thread has the next transfers to finish
        logger.exception("lmcache-xpu could not finish a transfer")
