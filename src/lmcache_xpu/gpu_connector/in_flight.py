"""Transfers beside the engine's own work: loads ahead of its layers, stores behind its steps.

A load is enqueued in the order of the layers, group by group; the engine's stream waits for a
group only where it comes to the group's first layer. A store is enqueued behind the step that
computed it, and LMCache gets to publish it when it is complete. The order on the device is kept by
events; nothing here waits on the engine's thread.

    schedule      a load begins while the step is still being decided on
    begin_step    blocks that this step writes anew wait until a store has read them
    add_load ...  enqueue the first layers
    before_layer  the engine's stream waits for this layer
    after_layer   enqueue the next ones
    end_step      nothing may be left to load
    add_store ..., publish
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.gpu_connector.load_pipeline import LayeredLoad, layer_cuts
from lmcache_xpu.transfer.slots import blocks_of
from lmcache_xpu.transfer.staging import AT_ONCE_BYTES, Moved, Stored

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

# Loaded tokens per token to compute from which on copying takes longer than computing. A guess:
# measured, 20 on an H200 and PCIe 5; more on devices that compute more slowly.
LOAD_BOUND = 32

# What is enqueued beyond what the engine waits for next, 10 ms of the link on an H200. More would
# only take the engine's thread, before its first layer and behind it.
AHEAD_BYTES = 512 * 2**20

POLL_S = 5e-4


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
        model_layers: layers of the model itself; those behind them are a drafter's. None: all.
        loads: loads run beside the engine's layers; else they are complete when they return.
        stores: stores run beside the engine's next steps; else they are complete when they return.
    """

    block_tokens: int
    model_layers: int | None = None
    loads: bool = True
    stores: bool = True
    _tokens: int | None = field(default=None, init=False)  # that this step computes
    _scheduling: bool = field(default=False, init=False)  # the step is still being decided on
    _computing: bool = field(default=False, init=False)  # the engine is at its layers
    _loads: list[_Load] = field(default_factory=list, init=False)
    _reading: list[tuple[Stored, torch.Tensor]] = field(default_factory=list, init=False)
    _unpublished: dict[int, Moved] = field(default_factory=dict, init=False)  # by id of object
    _finisher: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "lmcache-xpu-finish"), init=False
    )

    def schedule(self, written: frozenset[int], tokens: int) -> None:
        """As `begin_step`, of one request in a step that is still being decided on."""
        self._scheduling = True
        self._begin(written, tokens)

    def begin_step(self, written: frozenset[int] | None, tokens: int | None = None) -> None:
        """Protect blocks that a store has yet to read, and go on with loads that have begun.

        Args:
            written: blocks that were given to a request since the last step, so that the engine
                may write them; None if that is not known.
            tokens: that this step computes; None if that is not known.
        """
        self._scheduling = self._computing = False
        self._begin(written, tokens)
        for item in self._loads:
            if not item.load.enqueued:
                with item.load.enduring():
                    item.load.start()

    def protect(self, written: frozenset[int] | None) -> None:
        """Let the engine's stream wait for stores that have yet to read some blocks.

        Args:
            written: see `begin_step`.
        """
        self._reading = [item for item in self._reading if not item[0].gathered.reached()]
        if written == frozenset():
            return
        for stored, slots in self._reading:
            if written is None or not written.isdisjoint(blocks_of(slots, self.block_tokens)):
                stored.gathered.wait()

    def cuts(self, layers: int, tokens: int, layer_bytes: int) -> list[int]:
        """How to cut a load in this step; see `layer_cuts`.

        Args:
            layers: of the engine.
            tokens: that are loaded.
            layer_bytes: of these tokens in one layer.
        """
        much = self._tokens is None or self._tokens * LOAD_BOUND >= tokens
        head = max(1, AT_ONCE_BYTES // max(layer_bytes, 1)) if self._scheduling else 0
        return layer_cuts(layers, much_to_compute=much, head=head)

    def add_load(self, load: LayeredLoad, objs: Sequence[MemoryObj], finished: Finished) -> None:
        """Begin a load for this step. Its memory is held until it is complete, come what may."""
        self._loads.append(_Load(load, [], finished))
        self.hold(load, objs)
        if self._scheduling:
            self._feed()
        else:
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
        if self._loads and not self._computing:
            self._computing = True
            self._loads[0].load.let_engine_copy()
        for item in self._loads:
            with item.load.enduring():
                item.load.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        """Enqueue what comes after a layer that the engine has enqueued.

        So much that the link stays busy. Behind the first layers the device has nothing else to
        do than what this thread enqueues for the next one.
        """
        ahead = self._bytes_under_way()
        for load in sorted((item.load for item in self._loads), key=lambda one: one.enqueued):
            if ahead >= AHEAD_BYTES:
                break
            with load.enduring():
                ahead += load.after_layer(layer)

    def before_all(self) -> None:
        """Let the engine's stream wait for all layers, where it does not stop at each."""
        for item in self._loads:
            with item.load.enduring():
                item.load.before_all()

    def end_step(self) -> list[torch.Tensor]:
        """Let go of this step's loads; slots of those that the engine did not wait for.

        The engine may ask for them before its drafter has run, so a drafter's layers are waited for
        here. Nor would it do harm if that were too late: the model checks what a drafter proposes.
        """
        missed = []
        loads, self._loads = self._loads, []
        for item in loads:
            in_time = item.load.waited_for(self.model_layers)
            with item.load.enduring():
                item.load.before_all()
            item.load.before_all()  # also of one that failed just now
            loaded = in_time and item.load.waited_for()
            if not loaded:
                missed.append(item.load.slots)
            finished = item.finished if loaded else _not_counted
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

    def close(self) -> None:
        """As `drain`, for the last time: its thread ends. May be called again."""
        self._finisher.shutdown()

    def _begin(self, written: frozenset[int] | None, tokens: int | None) -> None:
        """What is the same for a step and for a request of one; see `begin_step`."""
        self._tokens = tokens
        self._feed()
        self.protect(written)

    def _feed(self) -> None:
        """Of loads that began before their step, enqueue so much that the link stays busy.

        In the order of the layers, until the engine computes or the next one begins.
        """
        ahead = self._bytes_under_way()
        loads = [item.load for item in self._loads]
        while loads and ahead < AHEAD_BYTES:
            load = min(loads, key=lambda one: one.enqueued)
            more = 0
            with load.enduring():
                more = load.go_on()
            ahead += more
            if not more:
                loads.remove(load)

    def _bytes_under_way(self) -> int:
        return sum(item.load.bytes_under_way() for item in self._loads)

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
