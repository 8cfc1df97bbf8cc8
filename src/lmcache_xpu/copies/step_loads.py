"""Loads inside the step of their requests, which run beside the step's layers.

Methods stand in the order of their calls. A scheduler in the worker's process makes the first, and
the worker calls `begin_answered` once more: vLLM's newer runner prepares a step before it.

vLLM copies a state into the block of its step before the first layer. So the engine's stream waits
for states at once, and they are loaded only where a scheduler begins ahead of the worker.

When the device has copied all, a thread compares the seals again. Until then nothing is stored that
came of a load, and what `take` returned waits when it is looked at.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.seals import SEAL_BYTES
from lmcache_xpu.cache.server import Question
from lmcache_xpu.copies.group_copies import GroupCopies, block_ids
from lmcache_xpu.copies.load_pipelines import LayerCopy, LoadPipeline, group_starts
from lmcache_xpu.copies.moves import Located, Moves
from lmcache_xpu.copies.pending_failures import Outcome, Outcomes
from lmcache_xpu.errors import TransferError
from lmcache_xpu.metrics import Flow, fallback, loaded
from lmcache_xpu.transfer.devices import Event
from lmcache_xpu.transfer.tuning import TUNING

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

ANSWER_S = 0.5  # that the engine waits for the server, at most
SOON_S = 0.002  # that it waits before vLLM prepares the step, at most
POLL_S = 5e-4


@dataclass(slots=True, eq=False)
class _Load:
    request_id: str
    chunks: list[list[list[int]]]  # by KV cache group
    outcome: Outcome
    asked: Question
    located: Located = field(init=False)  # as the next, once its first layers are enqueued
    pipeline: LoadPipeline = field(init=False)

    def moved(self, group: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Return a KV cache group's chunks, by their blocks, and their objects."""
        chunks = [self.chunks[group][chunk] for chunk in self.located.slots.chunks(group)]
        return chunks, self.located.objects[group]


class StepLoads:
    """The loads of the steps of a worker. Called by the engine's thread."""

    def __init__(
        self,
        moves: Moves,
        groups: Sequence[GroupCopies],
        layers: Iterable[str],  # that `before_layer` is called for, in the order of the engine
        draft_layers: int,  # so many at the end are a drafter's
        flow: Flow,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.outcomes = Outcomes()
        self._moves, self._groups = moves, groups
        self._flow, self._failed = flow, failed
        # A layer of several pages counts as so many, each as large as another's only one.
        in_layers = [copies for copies in groups if not copies.group.recurrent]
        pages = Counter(name for each in in_layers for part in each.parts for name in part.names)
        named = [name for name in layers if name in pages]
        stored = list(dict.fromkeys([*named, *pages]))
        # Where other layers are loaded, a step waits for all of its loads first.
        self._waits_for_all = len(named) < len(stored)
        order = [name for name in stored for _ in range(pages[name])]
        self._pages = len(order)
        self._last_pages = {name: page for page, name in enumerate(order)}
        self._model_pages = sum(pages[name] for name in stored[: len(stored) - draft_layers])
        places = {name: itertools.count(order.index(name)) for name in stored}
        # By number of the group; of its parts, which of the pages each layer is.
        self._places = {
            number: [[next(places[name]) for name in part.names] for part in copies.parts]
            for number, copies in enumerate(groups)
            if copies in in_layers
        }
        self._tokens = 0  # that this step computes
        self._is_ahead = False  # of the call of the worker for this step
        self._is_computing = False  # the engine has come to a layer
        self._asked: list[_Load] = []  # of this step
        self._loads: list[_Load] = []  # of them, those that have begun
        self._thread = ThreadPoolExecutor(1, "lmcache-xpu-finish")

    def begin_step(self, written: Collection[int]) -> None:
        """Begin a step, since whose last one requests have got the blocks `written`."""
        self.end()  # of a step that vLLM gave up
        self.outcomes.forget(written)

    def fail(self, blocks: Collection[int]) -> None:
        """Count blocks as unfilled whose loads nobody described."""
        if blocks:
            self.outcomes.decide(self.outcomes.expect(blocks), filled=False)

    def ask(self, load: TokenRange) -> None:
        """Ask where chunks are that this step loads, but what vLLM keeps."""
        chunks = [copies.chunks(load, loading=True) for copies in self._groups]
        blocks = block_ids(load, [copies.group for copies in self._groups])
        outcome = self.outcomes.expect(blocks)
        loaded("step")
        try:
            asked = self._moves.ask(load)
        except Exception as error:  # whatever: the request is computed
            self._fail(load.request_id, outcome, error)
        else:
            self._asked.append(_Load(load.request_id, chunks, outcome, asked))

    def begin_answered(self, tokens: int, *, scheduling: bool = False) -> None:
        """Enqueue the first layers of what the server has answered; waits `SOON_S` at most.

        With `scheduling`, vLLM has just decided on the step, and will call the worker for it.
        """
        if not (self._asked or self._loads):
            return
        self._tokens, self._is_ahead, self._is_computing = tokens, scheduling, False
        with self._moves.enqueueing():
            self._feed()
            for pipeline in [] if scheduling else self._pipelines:
                if not pipeline.done:
                    pipeline.enqueue(TUNING.first_groups)
        asked, self._asked = self._asked, []
        until = time.monotonic() + SOON_S
        for load in asked:
            if load.asked.answer.wait(max(0.0, until - time.monotonic())):
                self._enqueue(load, 0.0)
            else:
                self._asked.append(load)

    def begin(self, *, whole: bool) -> None:
        """Enqueue the first layers of all others; waits for their answers, `ANSWER_S` at most.

        A `whole` step stops at no layer, so it waits for all of them first.
        """
        until = time.monotonic() + ANSWER_S
        asked, self._asked = self._asked, []
        for load in asked:
            self._enqueue(load, max(0.0, until - time.monotonic()))
        if self._loads and (whole or self._waits_for_all):
            with self._moves.enqueueing():
                for pipeline in self._pipelines:
                    pipeline.before_all()

    @property
    def _pipelines(self) -> list[LoadPipeline]:
        return [load.pipeline for load in self._loads]

    def _enqueue(self, load: _Load, at_most_s: float) -> None:
        try:
            load.located = self._moves.locate(load.asked, at_most_s)
            with self._moves.ending(load.asked):
                load.pipeline = self._pipeline(load)
                load.pipeline.states = self._load_states(load)
        except Exception as error:  # whatever: the request is computed
            self._fail(load.request_id, load.outcome, error)
        else:
            self._begin(load)

    def _load_states(self, load: _Load) -> list[Event]:
        """Load states, for which the engine's stream waits at once."""
        states = [n for n in range(len(self._groups)) if n not in self._places]
        if states and not self._is_ahead:
            raise TransferError("a load of states as its step begins", "one before it")
        done = list[Event]()
        with self._moves.enqueueing(), ExitStack() as stack:
            for number in states:
                stack.enter_context(self._groups[number].copying())
                done += self._groups[number].load(*load.moved(number))
        for event in done:
            event.wait()
        return done

    def _pipeline(self, load: _Load) -> LoadPipeline:
        nbytes = sum(
            len(load.located.objects[number]) * (self._groups[number].object_bytes - SEAL_BYTES)
            for number in self._places
        )
        starts = group_starts(
            self._pages,
            nbytes // self._pages,
            loaded=load.asked.key.end - load.asked.key.start,
            computed=self._tokens,
            early=self._is_ahead,
        )
        copied = list[LayerCopy]()
        for number, places in self._places.items():
            copied += self._groups[number].beside_layers(*load.moved(number), places, starts)
        return LoadPipeline(copied, self._flow)

    def _begin(self, load: _Load) -> None:
        with self._moves.enqueueing():
            for stager in load.pipeline.stagers:
                stager.follow_engine()  # blocks may be of a request whose step still runs
            self._loads.append(load)
            if self._is_ahead:
                self._feed()
            else:
                load.pipeline.enqueue(TUNING.first_groups)

    def _feed(self) -> None:
        """Before the step, enqueue so much that the link stays busy, layer group by layer group."""
        pipelines = self._pipelines
        bytes_ahead = sum(pipeline.bytes_under_way() for pipeline in pipelines)
        while pipelines and bytes_ahead < TUNING.ahead_bytes:
            pipeline = min(pipelines, key=lambda pipeline: len(pipeline.done))
            nbytes = pipeline.enqueue(len(pipeline.done) + 1, early=True)
            bytes_ahead += nbytes
            if not nbytes:
                pipelines.remove(pipeline)

    def before_layer(self, name: str) -> None:
        """Let the engine's stream wait for a layer."""
        if self._loads and (page := self._last_pages.get(name)) is not None:
            with self._moves.enqueueing():
                if not self._is_computing:
                    self._is_computing = True
                    for part in itertools.chain(*(copies.parts for copies in self._groups)):
                        part.stager.let_engine_copy()
                for pipeline in self._pipelines:
                    pipeline.before_layer(page)

    def after_layer(self, name: str) -> None:
        """Enqueue one more layer group of each load, behind a layer of the engine."""
        if self._loads and (page := self._last_pages.get(name)) is not None:
            with self._moves.enqueueing():
                for pipeline in self._pipelines:
                    pipeline.after_layer(page)

    def end(self) -> None:
        """End this step's loads: what follows in the engine's stream waits for them."""
        asked, self._asked = self._asked, []
        for load in asked:
            self._moves.end_load(load.asked)
            error = TransferError("a load that vLLM never began", "a step that loads")
            self._fail(load.request_id, load.outcome, error)
        if not self._loads:
            return
        loads, self._loads = self._loads, []
        with self._moves.enqueueing():
            ends = [load.pipeline.end(self._model_pages) for load in loads]
        for load, is_in_time in zip(loads, ends, strict=True):
            if not is_in_time and load.pipeline.failed_behind is None:
                logger.error(
                    "vLLM computed without waiting for the KV cache of a request; "
                    "it is recomputed (docs: troubleshooting#load-not-awaited)"
                )
            self._thread.submit(self._decide, load, not is_in_time)

    def take(self) -> Collection[int]:
        """Return the blocks that loads left unfilled since the last call; see `Outcomes.take`."""
        self.end()  # vLLM may ask before it has its stores submitted
        return self.outcomes.take()

    def close(self) -> None:
        """Wait for what is on its way. May be called again."""
        self.end()
        self._thread.shutdown()

    def _decide(self, load: _Load, is_missed: bool) -> None:
        """Say whether a load has filled its blocks, once its copies are done; by any thread."""
        try:
            # Not synchronize(): beside it, another thread's launches took several times as long.
            while not load.pipeline.is_done:
                time.sleep(POLL_S)
            if is_missed:
                self._moves.end_load(load.asked)
            else:
                self._moves.finish(load.located)
        except Exception as error:  # whatever: the request is computed
            self._fail(load.request_id, load.outcome, error)
            return
        if is_missed:
            fallback("load")
        self.outcomes.decide(load.outcome, filled=not is_missed)

    def _fail(self, request_id: str, outcome: Outcome, error: Exception) -> None:
        try:
            self._failed(request_id, error)
        finally:
            self.outcomes.decide(outcome, filled=False)
