"""Loads inside the step of their requests, which run beside the step's layers.

    begin_step, ask vLLM has decided on a step: ask where the chunks are that it loads
    begin_answered  then, and again when the worker is called for the step: of loads whose chunks
                    are known, compare seals, and enqueue the first layers
    begin           vLLM has prepared the step: wait for the other answers, and do the same
    before_layer, after_layer, for each layer
    end             the step is enqueued
    take, outcomes  in any order: what was left unfilled, for vLLM; what stores wait for

A scheduler in the worker's process makes the first calls before the worker is called for the step:
vLLM's newer runner prepares the step first, and the link would be idle meanwhile.

When the device has copied all, a thread compares the seals again. Until then nothing is stored that
came of a load, and what `take` returned waits when it is looked at.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.seals import Seals
from lmcache_xpu.cache.server import Question
from lmcache_xpu.copies.group_copies import GroupCopies
from lmcache_xpu.copies.load_pipelines import LoadPipeline, group_starts
from lmcache_xpu.copies.moves import Located, Moves
from lmcache_xpu.copies.pending_failures import Outcome, Outcomes
from lmcache_xpu.errors import TransferError
from lmcache_xpu.metrics import Flow, fallback, loaded
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK
from lmcache_xpu.transfer.tuning import TUNING

__all__ = ["StepLoads"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

ANSWER_S = 0.5  # that the engine waits for the server, at most
SOON_S = 0.002  # that it waits before vLLM prepares the step, at most
# LMCache's thread sends a question. Python lets it run when this one waits, or else after 5 ms.
SENT_S = 0.0003
POLL_S = 5e-4


@dataclass(slots=True, eq=False)
class _Load:
    request_id: str
    chunks: list[list[int]]
    outcome: Outcome
    asked: Question
    seals: Seals | None  # that its chunks should have
    located: Located | None = None
    parts: list[LoadPipeline] = field(default_factory=list)


class StepLoads:
    """The loads of the steps of a worker with one KV cache group. Called by the engine's thread.

    Args:
        draft_layers: so many layers at the end are a drafter's.
        flow: counts failures.
        failed: is called with a request whose load failed, and why.
    """

    def __init__(
        self,
        moves: Moves,
        copies: GroupCopies,
        draft_layers: int,
        flow: Flow,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.outcomes = Outcomes()
        self._moves = moves
        self._copies = copies
        self._flow = flow
        self._failed = failed
        layers, pages = copies.group.layers, copies.pages_per_layer
        self._last_pages = {
            name: (number + 1) * pages - 1 for number, name in enumerate(layers) if pages
        }
        self._model_pages = (len(layers) - draft_layers) * pages if pages else None
        self._tokens = 0  # that this step computes
        self._is_ahead = False  # of the call of the worker for this step
        self._is_computing = False  # the engine has come to a layer
        self._asked: list[_Load] = []  # of this step
        self._loads: list[_Load] = []  # of them, those that have begun
        self._thread = ThreadPoolExecutor(1, "lmcache-xpu-finish")

    # Before the step's layers

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
        chunks = self._copies.chunks(load, loading=True)
        outcome = self.outcomes.expect(set(itertools.chain(*chunks)) - {NULL_BLOCK})
        loaded("step")
        try:
            asked = self._moves.ask(load)
            asked.answer.wait(SENT_S)
            with self._moves.ending(asked):
                # Before there is an answer, which the server looks up meanwhile.
                seals = self._moves.seals(asked.key)
        except Exception as error:  # whatever: the request is computed
            self._fail(load.request_id, outcome, error)
        else:
            self._asked.append(_Load(load.request_id, chunks, outcome, asked, seals))

    def begin_answered(self, tokens: int, *, scheduling: bool = False) -> None:
        """Enqueue the first layers of what the server has answered; waits `SOON_S` at most.

        The step computes so many tokens. If it is `scheduling`, vLLM has just decided on the step,
        and will call the worker for it.
        """
        if not (self._asked or self._loads):
            return
        self._tokens, self._is_ahead, self._is_computing = tokens, scheduling, False
        with self._moves.enqueueing():
            self._feed()
            for part in [] if scheduling else self._parts:
                if not part.done:
                    part.enqueue(TUNING.first_groups)
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
        if self._loads and (whole or not self._last_pages):
            with self._moves.enqueueing():
                for part in self._parts:
                    part.before_all()

    @property
    def _parts(self) -> list[LoadPipeline]:
        return [part for load in self._loads for part in load.parts]

    def _enqueue(self, load: _Load, at_most_s: float) -> None:
        starts = functools.partial(
            group_starts,
            loaded=load.asked.key.end - load.asked.key.start,
            computed=self._tokens,
            early=self._is_ahead,
        )
        try:
            load.located = self._moves.locate(load.asked, load.seals, at_most_s)
            with self._moves.ending(load.asked):
                objects = load.located.objects[0]
                load.parts = self._copies.beside_layers(load.chunks, objects, starts, self._flow)
        except Exception as error:  # whatever: the request is computed
            self._fail(load.request_id, load.outcome, error)
            return
        self._begin(load)

    def _begin(self, load: _Load) -> None:
        with self._moves.enqueueing():
            for part in load.parts:
                part.stager.follow_engine()  # blocks may be of a request whose step still runs
            self._loads.append(load)
            if self._is_ahead:
                self._feed()
                return
            for part in load.parts:
                part.enqueue(TUNING.first_groups)

    def _feed(self) -> None:
        """Before the step, enqueue so much that the link stays busy, layer group by layer group."""
        parts = self._parts
        bytes_ahead = sum(part.bytes_under_way() for part in parts)
        while parts and bytes_ahead < TUNING.ahead_bytes:
            part = min(parts, key=lambda part: len(part.done))
            nbytes = part.enqueue(len(part.done) + 1, early=True)
            bytes_ahead += nbytes
            if not nbytes:
                parts.remove(part)

    # The step's layers, and its end

    def before_layer(self, name: str) -> None:
        """Let the engine's stream wait for a layer."""
        if self._loads and (page := self._last_pages.get(name)) is not None:
            with self._moves.enqueueing():
                if not self._is_computing:
                    self._is_computing = True
                    for part in self._parts[:1]:
                        part.stager.let_engine_copy()
                for part in self._parts:
                    part.before_layer(page)

    def after_layer(self, name: str) -> None:
        """Enqueue what comes after a layer that the engine has enqueued.

        No more than keeps the link busy: behind the first layers the device waits for this thread.
        """
        if self._loads and (page := self._last_pages.get(name)) is not None:
            with self._moves.enqueueing():
                parts = sorted(self._parts, key=lambda part: len(part.done))
                bytes_ahead = sum(part.bytes_under_way() for part in parts)
                for part in parts:
                    if bytes_ahead < TUNING.ahead_bytes:
                        bytes_ahead += part.after_layer(page)

    def end(self) -> None:
        """End this step's loads: what follows in the engine's stream waits for them."""
        asked, self._asked = self._asked, []
        for load in asked:
            self._moves.end_load(load.asked)
            never = TransferError("a load that vLLM never began", "a step that loads")
            self._fail(load.request_id, load.outcome, never)
        if not self._loads:
            return
        loads, self._loads = self._loads, []
        with self._moves.enqueueing():
            ends = [[part.end(self._model_pages) for part in load.parts] for load in loads]
        for load, in_time in zip(loads, ends, strict=True):
            is_missed = not all(in_time)
            if is_missed and all(part.failed_behind is None for part in load.parts):
                logger.error(
                    "vLLM computed without waiting for the KV cache of a request; "
                    "it is recomputed (docs: troubleshooting#load-not-awaited)"
                )
            if all(part.is_done for part in load.parts):
                self._decide(load, is_missed)
            else:
                self._thread.submit(self._decide, load, is_missed)

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
        assert load.located is not None
        try:
            # Not synchronize(): beside it, another thread's launches took several times as long.
            while not all(part.is_done for part in load.parts):
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
