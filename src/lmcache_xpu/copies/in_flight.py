"""Transfers in flight beside the engine: loads ahead of its layers, stores behind its steps.

The engine's stream waits for a layer group only where it comes to the group's first layer. Behind a
layer the next groups are enqueued, at most one of each request, until enough bytes are under way to
keep the link busy. A store is enqueued behind the step that computed it. LMCache publishes its
chunks when they are complete, and a step that was given one of their blocks waits on the device
until the block has been read. Nothing here waits on the engine's thread. On CPU nothing runs beside
anything: a layer is loaded when the engine comes to it.

A step has four phases. Each call belongs in some of them; a call in another one is an error of the
caller's, and an assertion:

    call          IDLE        SCHEDULING  PREPARING   COMPUTING   what it does
    schedule      SCHEDULING  stays       -           -           loads may begin before their step
    begin_step    PREPARING   PREPARING   stays       PREPARING   new blocks wait for their readers
    add_load      -           stays       stays       stays       enqueues the first layers
    before_all    -           -           stays       stays       the engine waits for all layers
    before_layer  stays       -           COMPUTING   stays       the engine waits for this layer
    after_layer   stays       -           COMPUTING   stays       enqueues the next layers
    end_step      stays       -           IDLE        IDLE        leaves nothing to load

`protect`, `add_store`, `publish`, `release`, `drain` and `close` may be called in each phase. In
IDLE, a layer is a drafter's: its turn comes when the step's loads have been ended.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.copies.finisher import Finisher
from lmcache_xpu.copies.load_pipeline import Finished, LoadPipeline, group_starts
from lmcache_xpu.transfer.devices import StoreHandle, TransferHandle
from lmcache_xpu.transfer.slots import blocks_of
from lmcache_xpu.transfer.tuning import Tuning


class Phase(Enum):
    """Where the engine is between two ends of a step."""

    IDLE = auto()  # no step has begun
    SCHEDULING = auto()  # vLLM still decides on a step, and loads for it have begun
    PREPARING = auto()  # the step is known, and the engine has not come to its first layer
    COMPUTING = auto()  # the engine is at its layers

    def check(self, call: str, *phases: Phase) -> None:
        """Assert that a call of `InFlight` belongs in this phase.

        Args:
            call: its name.
            phases: those in which it belongs.
        """
        assert self in phases, (
            f"InFlight.{call} was called in phase {self.name}; "
            f"it belongs in {' or '.join(phase.name for phase in phases)}."
        )


class _Load(NamedTuple):
    load: LoadPipeline
    objs: list[MemoryObj]
    finished: Finished


@dataclass
class InFlight:
    """The transfers that a connector has in flight. Called from the engine's worker thread alone.

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
    phase: Phase = field(default=Phase.IDLE, init=False)
    _tokens: int | None = field(default=None, init=False)  # that this step computes
    _loads: list[_Load] = field(default_factory=list, init=False)
    _reading: list[tuple[StoreHandle, torch.Tensor]] = field(default_factory=list, init=False)
    # By id of object.
    _unpublished: dict[int, TransferHandle] = field(default_factory=dict, init=False)
    _finisher: Finisher = field(default_factory=Finisher, init=False)

    # A step, in the order of its calls

    def schedule(self, new_blocks: frozenset[int], tokens: int) -> None:
        """Prepare for a load of a request whose step vLLM still decides on.

        Args:
            new_blocks: IDs of the blocks that the load writes.
            tokens: of the request that the step computes.
        """
        self.phase.check("schedule", Phase.IDLE, Phase.SCHEDULING)
        self.phase = Phase.SCHEDULING
        self._protect_and_feed(new_blocks, tokens)

    def begin_step(self, new_blocks: frozenset[int] | None, tokens: int | None = None) -> None:
        """Protect blocks that a store has yet to read, and go on with loads that have begun.

        Also after a step that vLLM gave up, as when a user interrupts it.

        Args:
            new_blocks: IDs of the blocks that requests were given since the last step; None if that
                is not known.
            tokens: that this step computes; None if that is not known.
        """
        if self.phase is Phase.COMPUTING:
            self.end_step()  # its requests are gone, and so is whom to tell of their loads
        self.phase = Phase.PREPARING
        self._protect_and_feed(new_blocks, tokens)
        for item in self._loads:
            if not item.load.enqueued:
                with item.load.enduring():
                    item.load.start()

    def group_starts(self, layers: int, tokens: int, layer_bytes: int, tuning: Tuning) -> list[int]:
        """Return the first layer of each group in which a load of this step comes.

        Before `add_load`, in the same phase; see `load_pipeline.group_starts`. `layer_bytes` are
        those of the loaded tokens in one layer.
        """
        much = self._tokens is None or self._tokens * tuning.loaded_per_computed >= tokens
        early = self.phase is Phase.SCHEDULING
        early_layers = max(1, tuning.direct_launch_bytes // max(layer_bytes, 1)) if early else 0
        return group_starts(layers, tuning, much_to_compute=much, early_layers=early_layers)

    def add_load(self, load: LoadPipeline, objs: Sequence[MemoryObj], finished: Finished) -> None:
        """Begin a load for this step. Its memory is held until it is complete, come what may.

        In SCHEDULING so much is enqueued that the link stays busy, in PREPARING the first layers.
        A load that comes in COMPUTING may be too late for its first layer; `end_step` reports it.
        """
        self.phase.check("add_load", Phase.SCHEDULING, Phase.PREPARING, Phase.COMPUTING)
        self._loads.append(_Load(load, [], finished))
        self.hold(load, objs)
        if self.phase is Phase.SCHEDULING:
            self._feed()
        else:
            with load.enduring():
                load.start()

    def hold(self, load: LoadPipeline, objs: Sequence[MemoryObj]) -> None:
        """Hold more memory for a load of this step."""
        self.phase.check("hold", Phase.SCHEDULING, Phase.PREPARING, Phase.COMPUTING)
        for item in self._loads:
            if item.load is load:
                for obj in objs:
                    obj.ref_count_up()
                item.objs.extend(objs)

    @property
    def loading(self) -> bool:
        """Whether this step has loads."""
        return bool(self._loads)

    def before_all(self) -> None:
        """Let the engine's stream wait for all layers, where it does not stop at each."""
        self.phase.check("before_all", Phase.PREPARING, Phase.COMPUTING)
        for item in self._loads:
            with item.load.enduring():
                item.load.before_all()

    def before_layer(self, layer: int) -> None:
        """Let the engine's stream wait for a layer of all loads."""
        self.phase.check("before_layer", Phase.IDLE, Phase.PREPARING, Phase.COMPUTING)
        if self.phase is Phase.PREPARING:
            self.phase = Phase.COMPUTING
            for item in self._loads[:1]:
                item.load.stager.let_engine_copy()
        for item in self._loads:
            with item.load.enduring():
                item.load.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        """Enqueue what comes after a layer that the engine has enqueued.

        So much that the link stays busy, and no more: behind the first layers the device waits for
        this thread. An engine that did not wait for its first layer is told so by `end_step`.
        """
        self.phase.check("after_layer", Phase.IDLE, Phase.PREPARING, Phase.COMPUTING)
        if self.phase is Phase.PREPARING:
            self.phase = Phase.COMPUTING
        if not self._loads:
            return
        bytes_ahead = self._bytes_under_way()
        loads = [item.load for item in self._loads]
        for load in sorted(loads, key=operator.attrgetter("enqueued")):
            if bytes_ahead >= load.tuning.ahead_bytes:
                break
            with load.enduring():
                bytes_ahead += load.after_layer(layer)

    def end_step(self) -> list[torch.Tensor]:
        """Let go of this step's loads, and return the slots of those that the engine missed.

        In IDLE it returns nothing: vLLM asks twice. The engine may ask before its drafter has run,
        so a drafter's layers are waited for here. Nor would it do harm if that were too late: the
        model checks what a drafter proposes.

        Returns:
            For each load that failed or was not waited for in time, its slots `[tokens]`.
        """
        self.phase.check("end_step", Phase.IDLE, Phase.PREPARING, Phase.COMPUTING)
        self.phase = Phase.IDLE
        failed_slots = []
        loads, self._loads = self._loads, []
        for item in loads:
            in_time = item.load.waited_for(self.model_layers)
            with item.load.enduring():
                item.load.before_all()
            item.load.before_all()  # also of one that failed just now
            loaded = in_time and item.load.waited_for()
            if not loaded:
                failed_slots.append(item.load.slots)
            finished = item.finished if loaded else lambda seconds: None  # not counted
            self.release(item.objs, item.load.handles(), finished)
        return failed_slots

    # Stores, and what is complete: in each phase

    def protect(self, new_blocks: frozenset[int] | None) -> None:
        """Let the engine's stream wait for stores that have yet to read some blocks.

        `begin_step` and `schedule` do it as well; they say what `new_blocks` are.
        """
        self._reading = [item for item in self._reading if not item[0].gathered.reached()]
        if new_blocks == frozenset():
            return
        for stored, slots in self._reading:
            if new_blocks is None or not new_blocks.isdisjoint(blocks_of(slots, self.block_tokens)):
                stored.gathered.wait()

    def release(
        self, objs: Sequence[MemoryObj], handles: Sequence[TransferHandle], finished: Finished
    ) -> None:
        """Give up memory that is held for transfers, when these are done."""
        self._finisher.when_done(handles, functools.partial(_release, objs, handles, finished))

    def add_store(
        self, objs: Sequence[MemoryObj], stored: StoreHandle, slots: torch.Tensor
    ) -> None:
        """Take over a store of slots `[tokens]`, on the host: `publish` waits for its objects."""
        self._reading.append((stored, slots))
        for obj in objs:
            self._unpublished[id(obj)] = stored.transfer

    def publish(self, objs: Sequence[MemoryObj], put: Callable[[], None]) -> None:
        """Call `put` when these objects are complete: now, or later from another thread."""
        handles = {self._unpublished.pop(id(obj), None) for obj in objs}
        self._finisher.when_done([handle for handle in handles if handle is not None], put)

    def drain(self) -> None:
        """Wait until everything is complete and published."""
        self._finisher.drain()

    def close(self) -> None:
        """Do as `drain` for the last time: the thread ends. May be called again."""
        self._finisher.close()

    def _protect_and_feed(self, new_blocks: frozenset[int] | None, tokens: int | None) -> None:
        self._tokens = tokens
        self._feed()
        self.protect(new_blocks)

    def _feed(self) -> None:
        """Enqueue so much of loads that began early that the link stays busy, layer by layer."""
        bytes_ahead = self._bytes_under_way()
        loads = [item.load for item in self._loads]
        while loads and bytes_ahead < loads[0].tuning.ahead_bytes:
            load = min(loads, key=operator.attrgetter("enqueued"))
            nbytes = 0  # also of one that fails
            with load.enduring():
                nbytes = load.go_on()
            bytes_ahead += nbytes
            if not nbytes:
                loads.remove(load)

    def _bytes_under_way(self) -> int:
        return sum(item.load.bytes_under_way() for item in self._loads)


def _release(
    objs: Sequence[MemoryObj], handles: Sequence[TransferHandle], finished: Finished
) -> None:
    for obj in objs:
        obj.ref_count_down()
    finished(sum(handle.seconds() for handle in handles))
