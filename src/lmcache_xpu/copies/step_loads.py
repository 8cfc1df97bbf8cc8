"""Loads inside the step of their requests, which run beside the step's layers.

    ask_early       a request has a hit, and may be in the next step: where its chunks are
    begin_step, ask once vLLM has decided on a step: the same of all others that it loads
    begin_answered  then, and again when a worker hears of the step: of loads whose chunks are
                    known, seals are compared, the first layers enqueued
    begin           vLLM has prepared the step: the same of the others, once their answers come
    before_layer, after_layer, for each layer
    end             the step is enqueued
    take, gate      in any order: what was left unfilled, for vLLM; what stores wait for

A scheduler in the worker's process makes the first calls before the worker hears of the step:
vLLM's newer runner prepares the step first, and the link would be idle meanwhile.

Seals are compared again when the device has copied all, by a thread. Until then nothing is stored
that came of a load, and what `take` returned waits for whoever looks at it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lmcache_xpu.cache.load_questions import Question
from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.cache.seals import Seals
from lmcache_xpu.cache.server import check_lease
from lmcache_xpu.copies.group_copies import BesideLayers, GroupCopies
from lmcache_xpu.copies.in_flight import InFlight, Phase
from lmcache_xpu.copies.late_blocks import Verdict, Verdicts
from lmcache_xpu.copies.load_pipeline import LoadPipeline
from lmcache_xpu.copies.moves import Located, Moves
from lmcache_xpu.errors import TransferError
from lmcache_xpu.metrics import fallback, loaded
from lmcache_xpu.model.kv_cache_groups import NULL_BLOCK

__all__ = ["StepLoads"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

ANSWER_S = 0.5  # that the engine waits for the server, at most
# vLLM prepares a step in 6 to 14 ms (8B on one H200), in which the link would be idle.
SOON_S = 0.002  # that it waits before that, at most
# LMCache's thread sends a question. Python lets it run when this one waits, or else after 5 ms.
SENT_S = 0.0003

Failed = Callable[[str, Exception], None]


@dataclass(slots=True, eq=False)
class _Load:
    request_id: str
    blocks: list[int]
    verdict: Verdict
    asked: Question | None = None
    seals: Seals | None = None
    plan: BesideLayers | None = None
    located: Located | None = None
    parts: list[LoadPipeline] = field(default_factory=list)


class StepLoads:
    """The loads of one worker's steps. Called by the engine's thread.

    Args:
        moves: of the worker.
        copies: of its only KV cache group.
        key: makes LMCache's key of a load.
        draft_layers: so many layers at the end are a drafter's.
        failed: is told of a load that failed, and why.
    """

    def __init__(
        self,
        moves: Moves,
        copies: GroupCopies,
        key: Callable[[TokenRange], Any],
        draft_layers: int,
        failed: Failed,
    ) -> None:
        self._moves = moves
        self._key = key
        self._copies = copies
        self._failed = failed
        layers, pages = copies.group.layers, copies.pages_per_layer
        self._last_pages = {
            name: (number + 1) * pages - 1 for number, name in enumerate(layers) if pages
        }
        model_pages = (len(layers) - draft_layers) * pages if pages else None
        self._in_flight = InFlight(copies.group.block_tokens, model_pages)
        self._early: dict[str, Question] = {}  # of the next step, by request
        self._asked: list[_Load] = []  # of this step
        self._loads: list[_Load] = []  # of them, those that have begun
        self._verdicts = Verdicts()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._copies.group.block_tokens

    @property
    def busy(self) -> bool:
        """Whether any load is on its way."""
        return self._verdicts.awaited

    def begin_step(self, written: Collection[int]) -> None:
        """Begin a step.

        Args:
            written: blocks that requests have got since the last one.
        """
        self.end()  # of a step that vLLM gave up
        self._verdicts.forget(written)

    def ask_early(self, load: TokenRange) -> None:
        """Ask where the chunks of a load are that the next step may have, once; raises nothing."""
        if load.request_id not in self._early:
            with suppress(Exception):  # whatever: its step asks again, and fails there
                self._early[load.request_id] = self._asked_at_once(load)

    def ask(self, load: TokenRange) -> None:
        """Ask where chunks are that this step loads, unless that was asked before.

        Args:
            load: with its blocks; those that vLLM keeps are left alone.
        """
        [blocks] = load.blocks
        has = load.kept // self.block_tokens
        ids = [NULL_BLOCK] * has + list(blocks[has:])
        verdict = self._verdicts.expect(block for block in ids if block != NULL_BLOCK)
        asked = _Load(load.request_id, ids, verdict)
        loaded("step")
        try:
            asked.asked = self._early.pop(load.request_id, None) or self._asked_at_once(load)
        except Exception as error:  # whatever: the request is computed
            self._fail(asked, error)
        else:
            self._asked.append(asked)

    def end_early(self) -> None:
        """End questions whose requests are not in the step after all."""
        for question in self._early.values():
            self._moves.end_load(question)
        self._early.clear()

    def _asked_at_once(self, load: TokenRange) -> Question:
        """Ask where chunks are, and let the question leave; errors as `Moves.ask_for_load`."""
        asked = self._moves.ask_for_load(self._key(load))
        asked.is_answered(SENT_S)
        return asked

    def fail(self, blocks: Collection[int]) -> None:
        """Count blocks as unfilled whose loads nobody described."""
        if blocks:
            self._verdicts.give(self._verdicts.expect(blocks), filled=False)

    def begin_answered(self, tokens: int, *, scheduling: bool = False) -> None:
        """Enqueue the first layers of what the server has answered; waits `SOON_S` at most.

        Args:
            tokens: that the step computes.
            scheduling: vLLM has just decided on the step, and no worker was told of it yet.
        """
        if not (self._asked or self._loads):
            return
        with self._moves.enqueueing, torch.inference_mode():
            if scheduling:
                self._in_flight.schedule(frozenset(), tokens)
            else:
                self._in_flight.begin_step(frozenset(), tokens)
        # What needs no answer comes first: the server is asked meanwhile.
        asked = [load for load in self._asked if load.plan or self._succeeds(self._prepare, load)]
        self._asked = []
        until = time.monotonic() + SOON_S
        for load in asked:
            assert load.asked is not None
            if load.asked.is_answered(max(0.0, until - time.monotonic())):
                self._begin(load, 0.0)
            else:
                self._asked.append(load)

    def begin(self, *, whole: bool) -> None:
        """Enqueue the first layers of all others; waits for their answers, `ANSWER_S` at most.

        Args:
            whole: the step stops at no layer, so it waits for all of them first.
        """
        end = time.monotonic() + ANSWER_S
        asked, self._asked = self._asked, []
        for load in asked:
            self._begin(load, max(0.0, end - time.monotonic()))
        if self._loads and (whole or not self._last_pages):
            with self._moves.enqueueing, torch.inference_mode():
                self._in_flight.before_all()

    def _begin(self, load: _Load, at_most_s: float) -> None:
        if self._succeeds(self._enqueue, load, at_most_s):
            self._loads.append(load)

    def _succeeds(self, act: Callable[..., None], load: _Load, *rest: float) -> bool:
        try:
            act(load, *rest)
        except Exception as error:  # whatever: the request is computed
            self._fail(load, error)
            return False
        return True

    def _prepare(self, load: _Load) -> None:
        assert load.asked is not None
        key, tokens = load.asked.key, self._tokens(load)
        starts = functools.partial(self._group_starts, tokens)
        try:
            if tokens != key.end - key.start:
                raise TransferError(
                    f"blocks for {tokens} tokens, and a question of {key.start} to {key.end}",
                    "a question of the same range",
                )
            load.seals = self._moves.seals(key)
            load.plan = self._copies.beside_layers(
                self._copies.chunks(load.blocks), starts, self._moves.load_flow
            )
        except BaseException:
            self._moves.end_load(load.asked)
            raise

    def _enqueue(self, load: _Load, at_most_s: float) -> None:
        assert load.asked is not None
        assert load.plan is not None
        slots = self._moves.slots(load.asked, at_most_s)
        try:
            load.located = self._moves.locate(load.asked, slots, load.seals)
            load.parts = load.plan(load.located.objects[0])
        except BaseException:
            self._moves.end_load(load.asked)
            raise
        with self._moves.enqueueing, torch.inference_mode():
            self._copies.follow_engine()  # blocks may be of a request whose step still runs
            for part in load.parts:
                self._in_flight.add_load(part, (), _leave)

    def _group_starts(self, tokens: int, layers: int, layer_bytes: int, tuning: Any) -> list[int]:
        return self._in_flight.group_starts(layers, tokens, layer_bytes, tuning)

    def _tokens(self, load: _Load) -> int:
        return len(load.blocks) * self.block_tokens

    def before_layer(self, name: str) -> None:
        """Let the engine's stream wait for a layer."""
        if self._loads and (page := self._last_pages.get(name)) is not None:
            with self._moves.enqueueing, torch.inference_mode():
                self._in_flight.before_layer(page)

    def after_layer(self, name: str) -> None:
        """Enqueue what comes after a layer that the engine has enqueued."""
        if self._loads and (page := self._last_pages.get(name)) is not None:
            with self._moves.enqueueing, torch.inference_mode():
                self._in_flight.after_layer(page)

    def end(self) -> None:
        """End this step's loads: what follows in the engine's stream waits for them."""
        asked, self._asked = self._asked, []
        for load in asked:
            assert load.asked is not None
            self._moves.end_load(load.asked)
            self._fail(load, TransferError("a load that vLLM never began", "a step that loads"))
        if not self._loads and self._in_flight.phase is Phase.IDLE:
            return
        with self._moves.enqueueing, torch.inference_mode():
            if self._in_flight.phase is Phase.SCHEDULING:
                self._in_flight.begin_step(frozenset())
            missed = {id(slots) for slots in self._in_flight.end_step()}
        loads, self._loads = self._loads, []
        for load in loads:
            handles = [handle for part in load.parts for handle in part.handles()]
            is_missed = any(id(part.slots) in missed for part in load.parts)
            if is_missed and all(part.failed_behind is None for part in load.parts):
                logger.error(
                    "vLLM computed without waiting for the KV cache of a request; "
                    "it is recomputed (docs: troubleshooting#load-not-awaited)"
                )
            decide = functools.partial(self._decide, load, is_missed)
            self._in_flight.release((), handles, decide)

    def _decide(self, load: _Load, is_missed: bool, _seconds: float) -> None:
        """Say whether a load whose copies are done has filled its blocks; by any thread."""
        assert load.asked is not None
        assert load.located is not None
        begun = load.asked.begun
        try:
            try:
                if not is_missed:
                    load.located.check()
                    check_lease(begun)
            finally:
                self._moves.end_load(load.asked)
        except Exception as error:  # whatever: the request is computed
            self._fail(load, error)
            return
        if not is_missed:
            self._moves.count_load(load.located.slots, time.monotonic() - begun)
        self._say(load, filled=not is_missed)

    def _fail(self, load: _Load, error: Exception) -> None:
        try:
            self._failed(load.request_id, error)
        finally:
            self._say(load, filled=False)

    def _say(self, load: _Load, *, filled: bool) -> None:
        if not filled:
            fallback("load")
        self._verdicts.give(load.verdict, filled=filled)

    def take(self) -> Collection[int]:
        """Return the blocks that loads left unfilled since the last call; see `LateBlocks`."""
        self.end()  # vLLM may ask before it has its stores submitted
        return self._verdicts.take()

    def gate(self, blocks: Collection[int]) -> Callable[[], None]:
        """Return what a store of these blocks has to pass; see `Verdicts.gate`."""
        return self._verdicts.gate(blocks)

    def close(self) -> None:
        """Wait for what is on its way."""
        self.end()
        self._in_flight.close()


def _leave(seconds: float) -> None:
    """Count nothing: `StepLoads._decide` does."""
