"""A load inside a step, which runs beside the engine's layers.

The engine's stream waits for a layer group where it comes to the group's first layer. On CPU a
layer is loaded when the engine comes to it. Calls wait for nothing, unless host memory is not
pinned.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from typing import NamedTuple

from lmcache_xpu.metrics import Flow
from lmcache_xpu.transfer.devices import Event
from lmcache_xpu.transfer.plan import HostMemory, LayerGroup
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.tuning import TUNING

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only


class LayerCopy(NamedTuple):
    """A layer group of a load, whose layers are alike and have the same blocks."""

    layer: int  # the first of its layers, in the engine's order
    stager: Stager
    group: LayerGroup
    memory: HostMemory


class LoadPipeline:
    """A load by layer groups of all KV cache groups, in the order of the engine's layers.

    An error is counted and logged, and ends the load, not the engine's step.
    """

    def __init__(self, groups: Iterable[LayerCopy], flow: Flow) -> None:
        self._groups = sorted(groups, key=lambda copy: copy.layer)
        self.starts = [copy.layer for copy in self._groups]  # first layer of each
        self.stagers = list(dict.fromkeys(copy.stager for copy in self._groups))
        self.done: list[Event] = []  # by group, of those that were enqueued
        # Of a load that failed, what is done when all that it enqueued is.
        self.failed_behind: tuple[Event, ...] | None = None
        self.states: list[Event] = []  # of states, which are there before the first layer
        self._flow = flow
        self._arrived = 0  # groups
        self._waited = 0  # groups
        self._head_start = 0  # groups that were enqueued before the step

    @property
    def is_done(self) -> bool:
        """Whether nothing that was enqueued is on its way any more."""
        last = self._last(0) if self.failed_behind is None else self.failed_behind
        return all(event.reached() for event in (*self.states, *last))

    def _last(self, first: int, end: int | None = None) -> Iterable[Event]:
        """Return the last events of some enqueued groups, one for each stager: it keeps order."""
        pairs = zip(self._groups[first:end], self.done[first:end], strict=False)
        return {copy.stager: done for copy, done in pairs}.values()

    def bytes_under_way(self) -> int:
        """Return the bytes of enqueued groups that have not arrived; 0 of a load that failed."""
        if self.failed_behind is not None:
            return 0
        # In order: a group that has arrived is not looked at again.
        while self._arrived < len(self.done) and self.done[self._arrived].reached():
            self._arrived += 1
        return sum(copy.group.nbytes for copy in self._groups[self._arrived : len(self.done)])

    def enqueue(self, groups: int, *, early: bool = False) -> int:
        """Enqueue the first groups, unless they were; return the bytes of those that were not.

        Before the step that waits for them (`early`), only what kernels load: the engine has its
        own few bytes to copy before it computes, and copies that are enqueued now would go first.
        """
        begun = len(self.done)
        try:
            for _, stager, group, memory in self._groups[begun:groups]:
                if self.failed_behind is not None:
                    break
                if early and not stager.needs_no_copies(group.pieces, memory):
                    break
                # What the engine computes in this step waits for the first group.
                idle = early or not self.done
                self.done.append(stager.load(group.pieces, memory, idle=idle))
        except Exception as error:
            # A part of a group may be on its way.
            self.failed_behind = tuple(stager.fence() for stager in self.stagers)
            self._flow.failed(type(error).__name__)
            logger.exception(
                "A load failed and is computed instead: %s (docs: troubleshooting#transfer-failed)",
                error,
            )
        if early:
            self._head_start = len(self.done)
        return sum(copy.group.nbytes for copy in self._groups[begun : len(self.done)])

    def before_layer(self, layer: int) -> None:
        """Let the current stream wait for a layer."""
        groups = bisect.bisect_right(self.starts, layer)
        self.enqueue(groups)
        if self.failed_behind is None and groups > self._waited:
            for done in self._last(self._waited, groups):
                done.wait()
            self._waited = groups

    def after_layer(self, layer: int) -> None:
        """Enqueue one more group behind a layer, unless none has its turn.

        Not before the layer's own work: drivers take about a thousand copies, and then the caller
        waits. And only one: behind the first layer the device has no other work yet.
        """
        ahead = max(TUNING.groups_ahead, self._head_start)
        last = bisect.bisect_right(self.starts, layer) + ahead
        self.enqueue(min(last, len(self.done) + 1))

    def before_all(self) -> None:
        """Enqueue what is left, and let the current stream wait for all that was enqueued."""
        for last in self.starts[-1:]:
            self.before_layer(last)
        for done in self.failed_behind or ():
            done.wait()

    def end(self, layers: int) -> bool:
        """Do as `before_all`; whether the engine had come to so many layers, from the first one on.

        It may end a step before its drafter has run, so a drafter's layers are waited for here. Nor
        would it do harm if that were too late: the model checks what a drafter proposes.
        """
        is_in_time = self._waited >= bisect.bisect_left(self.starts, layers)
        self.before_all()
        return is_in_time and self.failed_behind is None


def group_starts(
    layers: int, layer_bytes: int, *, loaded: int, computed: int, early: bool
) -> list[int]:
    """Return the first layer of each layer group of a load.

    With much to compute beside the load, groups of 1, 1, 2, 2, ..., 1, 1 layers: each arrives by
    the time that those before it are computed, also where copying takes as long. Of a load that
    begins before its step (`early`), the first are larger. With little to compute each group is
    three quarters of what is left, so that most layers come in few large copies.

    The load is of so many `loaded` tokens, with `layer_bytes` in each layer; its step computes
    others.
    """
    single, large = (0, TUNING.early_groups) if early else (TUNING.single_layers, 0)
    starts = [0]
    while (start := starts[-1]) < layers:
        left = layers - start
        if computed * TUNING.loaded_per_computed < loaded:
            size = max(left - left // 4, min(left, TUNING.least_layers))
        elif len(starts) <= large:
            size = min(left, max(1, TUNING.direct_launch_bytes // max(layer_bytes, 1)))
        elif len(starts) <= single:
            size = 1
        else:
            size = min(TUNING.most_layers, max(1, left // 2))
        starts.append(start + size)
    return starts[:-1]
