"""A load in the order of the layers, each group waited for where the engine comes to it.

A load enqueues its first layer groups and returns; one that began before its step, as much as keeps
the link busy until the next call. Each group is enqueued behind the engine's stream, because freed
blocks may still be read by a step that was enqueued before.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lmcache_xpu.metrics import LOAD_CPU, Flow
from lmcache_xpu.transfer.devices import TransferHandle
from lmcache_xpu.transfer.plan import HostMemory, LayerGroup, Plan
from lmcache_xpu.transfer.staging import Stager
from lmcache_xpu.transfer.tuning import Tuning

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

Finished = Callable[[float], None]  # is told how many seconds a transfer took


class LoadPipeline:
    """The load of one request, by layer groups in the order of the layers.

    Calls only enqueue, and wait for nothing, unless host memory is not pinned. The load has failed
    if `failed_behind` is not None: its transfers so far are done when that handle is, and no more
    is enqueued.

    Args:
        stager: of the engine's KV cache.
        slots: those of the loaded tokens, for a report; on the host.
        flow: counts an error.
    """

    def __init__(self, stager: Stager, slots: torch.Tensor, flow: Flow = LOAD_CPU) -> None:
        self.slots = slots
        self._flow = flow
        self.failed_behind: TransferHandle | None = None
        self.stager = stager
        # With the memory of its layers, and the engine's layer that is the first one in that.
        self._groups: list[tuple[LayerGroup, HostMemory, int]] = []
        self._starts: list[int] = []  # first layer of each group, as the engine counts
        self._handles: list[TransferHandle] = []  # by group, of those that were enqueued
        self._arrived = 0  # groups
        self._waited = 0  # groups
        self._head_start = 0  # groups that were enqueued before the step

    @property
    def tuning(self) -> Tuning:
        """The numbers that suit the device."""
        return self.stager.tuning

    def add(self, plan: Plan, memory: Sequence[torch.Tensor], first_layer: int = 0) -> None:
        """Add layers behind those that were added before.

        Arguments as for `Stager.load`, a plan in place of the pieces.
        """
        host = HostMemory.of(memory)
        for group in plan.groups:
            self._groups.append((group, host, first_layer))
            self._starts.append(first_layer + group.layers.start)

    @contextmanager
    def enduring(self) -> Iterator[None]:
        """Let an error in a step of the load end the load, not the engine's step."""
        try:
            yield
        except Exception as error:
            self.failed_behind = self.stager.fence()  # a part of a group may be on its way
            self._flow.failed(type(error).__name__)
            logger.exception(
                "A load failed and is computed instead: %s (docs: troubleshooting#transfer-failed)",
                error,
            )

    def start(self) -> None:
        """Enqueue the first groups."""
        if self.failed_behind is None:
            self._enqueue(self.tuning.first_groups)

    def go_on(self) -> int:
        """Enqueue one more group before the step that waits for it, and return its bytes.

        0 if none is left, or none that kernels load: the engine has its own few bytes to copy
        before it computes, and copies that are enqueued now would go before them.
        """
        count = len(self._handles)
        if self.failed_behind is not None or count == len(self._groups):
            return 0
        group, memory, _ = self._groups[count]
        if not self.stager.needs_no_copies(group.pieces, memory):
            return 0
        self._head_start = count + 1
        return self.enqueue_next()

    def enqueue_next(self) -> int:
        """Enqueue one more group of a load that no step waits for, and return its bytes.

        0 if none is left.
        """
        count = len(self._handles)
        if self.failed_behind is not None or count == len(self._groups):
            return 0
        self._enqueue(count + 1, idle=True)
        return self._groups[count][0].nbytes

    def arrived(self, within_bytes: int = 0) -> bool:
        """Whether all groups are there; or, of a load that failed, nothing is on its way.

        Args:
            within_bytes: so much may still be on its way, if all was enqueued.
        """
        if self.failed_behind is not None:
            return self.failed_behind.done.reached()
        return len(self._handles) == len(self._groups) and self.bytes_under_way() <= within_bytes

    @property
    def enqueued(self) -> int:
        """Number of groups that were enqueued so far."""
        return len(self._handles)

    def bytes_under_way(self) -> int:
        """Return the bytes of enqueued groups that are not there yet."""
        if self.failed_behind is not None:
            return 0
        # In order: a group that has arrived is not looked at again.
        while self._arrived < len(self._handles) and self._handles[self._arrived].done.reached():
            self._arrived += 1
        under_way = self._groups[self._arrived : len(self._handles)]
        return sum(group.nbytes for group, *_ in under_way)

    def before_layer(self, layer: int) -> None:
        """Let the current stream wait for a layer."""
        if self.failed_behind is not None:
            return
        count = bisect.bisect_right(self._starts, layer)
        if count > self._waited:
            self._enqueue(count)
            self._handles[count - 1].done.wait()
            self._waited = count

    def after_layer(self, layer: int) -> int:
        """Enqueue what comes next, and return its bytes.

        Only now, when the layer's own work is enqueued: drivers take about a thousand copies and
        then let the caller wait. And one group at most: behind the first layer the device has no
        other work yet.
        """
        count = len(self._handles)
        ahead = max(self.tuning.groups_ahead, self._head_start)
        most = min(bisect.bisect_right(self._starts, layer) + ahead, len(self._groups))
        if self.failed_behind is not None or count >= most:
            return 0
        self._enqueue(count + 1)
        return self._groups[count][0].nbytes

    def before_all(self) -> None:
        """Enqueue what is left, and let the current stream wait for all that was enqueued."""
        for last in self._starts[-1:]:
            self.before_layer(last)
        if self.failed_behind is not None:
            self.failed_behind.done.wait()

    def waited_for(self, layers: int | None = None) -> bool:
        """Whether the engine's stream waits for the first layers, or for all of them."""
        count = len(self._starts) if layers is None else bisect.bisect_left(self._starts, layers)
        return self.failed_behind is None and self._waited >= count

    def __len__(self) -> int:
        """Number of groups that were added."""
        return len(self._groups)

    def synchronize(self, groups: int) -> None:
        """Wait on this thread for the first groups, as far as they were enqueued."""
        for last in self._handles[:groups][-1:]:
            last.done.synchronize()

    def handles(self) -> list[TransferHandle]:
        """Return a handle from the first copy to the last that was enqueued; none without one."""
        handles = [*self._handles, *filter(None, [self.failed_behind])]
        return [TransferHandle(handles[0].started, handles[-1].done)] if handles else []

    def _enqueue(self, groups: int, *, idle: bool = False) -> None:
        for number in range(len(self._handles), min(groups, len(self._groups))):
            group, memory, first_layer = self._groups[number]
            # What the engine computes in this step waits for the first group.
            first = idle or number == 0
            self._handles.append(self.stager.load(group.pieces, memory, first_layer, idle=first))


def group_starts(
    layers: int, tuning: Tuning, *, much_to_compute: bool, early_layers: int = 0
) -> list[int]:
    """Return the first layer of each layer group of a load.

    With much to compute beside the load, groups of 1, 1, 2, 2, ..., 1, 1 layers: the first come
    early, and each is there by the time that the ones before it have been computed, also where
    copying takes about as long as computing. With little to compute each group is three quarters of
    what is left, so that most layers come in few large copies.

    Args:
        layers: of the engine.
        tuning: of its device.
        much_to_compute: see above.
        early_layers: of each of the first groups where the load begins before its step and there is
            much to compute; 0 for a load that begins with its step.
    """
    starts = [0]
    while (start := starts[-1]) < layers:
        left = layers - start
        if not much_to_compute:
            size = max(left - left // 4, min(left, tuning.least_layers))
        elif early_layers and len(starts) <= tuning.early_groups:
            size = min(early_layers, left)
        elif not early_layers and len(starts) <= tuning.single_layers:
            size = 1
        else:
            size = min(tuning.most_layers, max(1, left // 2))
        starts.append(start + size)
    return starts[:-1]
