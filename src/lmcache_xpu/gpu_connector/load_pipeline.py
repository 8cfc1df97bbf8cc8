"""A load in the order of the layers: cut by cut, each waited for where the engine comes to it."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lmcache_xpu.metrics import LOAD_CPU
from lmcache_xpu.transfer.plan import Plan
from lmcache_xpu.transfer.staging import Moved, Stager

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

SINGLE = 4  # cuts of one layer each, at the start beside much computing
MOST_LAYERS = 2  # of a later one
LEAST_LAYERS = 8  # of a cut that shrinks; smaller copies are slower

AHEAD = 2  # cuts that are enqueued beyond the layer that the engine is at

HEAD_CUTS = 2  # larger ones, of a load that begins before its step

# Cuts that are enqueued at once: the engine prepares its step meanwhile (8 ms were seen), and other
# requests' loads are enqueued.
FIRST = 2


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
        self._arrived = 0  # cuts
        self._waited = 0  # cuts
        self._head_start = 0  # cuts that were enqueued before the step
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
        """Enqueue the first cuts."""
        self._enqueue(FIRST)

    def go_on(self) -> int:
        """Enqueue one more cut before the step that waits for it, and give its bytes.

        0 if none is left, or none that kernels load: the engine has its own few bytes to copy
        before it computes, and copies that are enqueued now would go before them.
        """
        at = len(self._moved)
        if self._failed or at == len(self._cuts):
            return 0
        plan, memory, _, number = self._cuts[at]
        if not self._stager.needs_no_copies(plan, memory, number):
            return 0
        self._enqueue(at + 1, alone=True)
        self._head_start = at + 1
        return self._bytes(at)

    @property
    def enqueued(self) -> int:
        """Cuts so far."""
        return len(self._moved)

    def bytes_under_way(self) -> int:
        """Those of the enqueued cuts that are not there yet."""
        if self._failed:
            return 0
        # In order: what was found once is not asked again.
        while self._arrived < len(self._moved) and self._moved[self._arrived].done.reached():
            self._arrived += 1
        return sum(self._bytes(at) for at in range(self._arrived, len(self._moved)))

    def let_engine_copy(self) -> None:
        """Order copies that follow after what the engine has enqueued; see `Stager`."""
        self._stager.let_engine_copy()

    def before_layer(self, layer: int) -> None:
        """Let the current stream wait for a layer."""
        if self._failed:
            return
        cuts = bisect.bisect_right(self._starts, layer)
        if cuts > self._waited:
            self._enqueue(cuts)
            self._moved[cuts - 1].done.wait()
            self._waited = cuts

    def after_layer(self, layer: int) -> int:
        """Enqueue what comes next, and give its bytes.

        Only now, when the layer's own work is enqueued: drivers take about a thousand copies and
        then let the caller wait. And one cut at most: a hundred copies take a millisecond to
        enqueue, and behind the first layer the device has no other work yet.
        """
        at = len(self._moved)
        ahead = bisect.bisect_right(self._starts, layer) + max(AHEAD, self._head_start)
        if self._failed or at >= min(ahead, len(self._cuts)):
            return 0
        self._enqueue(at + 1)
        return self._bytes(at)

    def before_all(self) -> None:
        """Enqueue what is left, and let the current stream wait for all that was enqueued."""
        for last in self._starts[-1:]:
            self.before_layer(last)
        if self._failed:
            self._moved[-1].done.wait()

    def waited_for(self, layers: int | None = None) -> bool:
        """Whether the engine's stream waits for the first layers, or for all of them."""
        cuts = len(self._starts) if layers is None else bisect.bisect_left(self._starts, layers)
        return not self._failed and self._waited >= cuts

    def __len__(self) -> int:
        """Cuts that were added."""
        return len(self._cuts)

    def synchronize(self, cuts: int) -> None:
        """Wait for the first cuts, of those that were enqueued."""
        for last in self._moved[:cuts][-1:]:
            last.done.synchronize()

    def moved(self) -> list[Moved]:
        """From the first copy to the last that was enqueued; nothing if none was."""
        return [Moved(self._moved[0].begun, self._moved[-1].done)] if self._moved else []

    def _bytes(self, at: int) -> int:
        plan, _, _, number = self._cuts[at]
        return plan.cut_bytes(number)

    def _enqueue(self, cuts: int, *, alone: bool = False) -> None:
        for at in range(len(self._moved), min(cuts, len(self._cuts))):
            plan, memory, first, number = self._cuts[at]
            # What the engine computes in this step waits for the first cut.
            idle = alone or at == 0
            self._moved.append(self._stager.load(plan, memory, first, number, alone=idle))


def layer_cuts(layers: int, *, much_to_compute: bool, head: int = 0) -> list[int]:
    """The first layer of each cut.

    With much to compute beside the load, cuts of 1, 1, 1, 1, 2, 2, ..., 1, 1 layers: the first
    come early and are enqueued quickly, while the device has no other work yet, and each is there
    by the time that the ones before it have been computed, also where copying takes about as long
    as computing (larger ones make the engine wait).
    With little to compute the copies are what takes time: each cut is three quarters of what is
    left, so that most layers come in few large copies.

    Args:
        layers: of the engine.
        much_to_compute: see above.
        head: of a load that begins before its step: layers of the first two cuts, beside much.
    """
    starts = [0]
    while (at := starts[-1]) < layers:
        left = layers - at
        if not much_to_compute:
            size = max(left - left // 4, min(left, LEAST_LAYERS))
        elif head and len(starts) <= HEAD_CUTS:
            size = min(head, left)
        elif not head and len(starts) <= SINGLE:
            size = 1
        else:
            size = min(MOST_LAYERS, max(1, left // 2))
        starts.append(at + size)
    return starts[:-1]
