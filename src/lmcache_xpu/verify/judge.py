"""Compare what a connector gave back with what was computed, and say where they differ first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from lmcache_xpu.bench.engine import Blocks
from lmcache_xpu.bench.runner import Child
from lmcache_xpu.errors import EngineError
from lmcache_xpu.verify import cases
from lmcache_xpu.verify.asking import Asked
from lmcache_xpu.verify.cases import Facts, Pair

RESTARTED = 4  # prompts that are asked after a restart, half of them with damaged files
NOT_REPEATED = "answers and what was computed are not compared: this engine's change by themselves"

Start = Callable[[str], Child]  # of "connector", or "plain": an engine without one


class Outcome(StrEnum):
    """What a case came to."""

    EXACT = "exact"
    WRONG = "WRONG"
    NO_HIT = "no hit"  # nothing was loaded, so nothing is proven


@dataclass(slots=True)
class Result:
    """A case, and what was compared in it."""

    case: str
    tokens: int = 0  # of its prompts
    hit: int = 0  # of those, tokens that the connector promised
    own: int = 0  # and those that vLLM's own cache had
    compared: int = 0  # blocks, of all groups
    preemptions: int = 0
    different: list[str] = field(default_factory=list)  # in words, the first one first
    note: str = ""

    @property
    def outcome(self) -> Outcome:
        """What the case came to."""
        if self.different:
            return Outcome.WRONG
        return Outcome.EXACT if self.hit else Outcome.NO_HIT


def verify(start: Start, *, restart: bool, disk: Path | None = None) -> list[Result]:
    """Ask engines with the connector, one after the other, and judge what they give back.

    Args:
        start: makes the process of an engine.
        restart: whether a second engine is asked for what the first one stored.
        disk: a directory that holds all that was stored; a byte of each file is flipped.

    Raises:
        EngineError: an engine does not start, or gives no answer.
    """
    stored: list[Asked] = []
    with start("connector") as child:
        facts: Facts = _do(child, "start", cases.begin)
        single = [
            _do(child, case.name, partial(cases.hit, case=case)) for case in cases.cases(facts)
        ]
        at_once: list[Pair] = _do(child, "many at once", cases.crowd)
        if restart:
            stored = _do(child, "store", partial(cases.store, count=RESTARTED))
    if stored:
        with start("connector") as child:
            _do(child, "start again", cases.begin)
            for number, name in enumerate(("after a restart", "from files with a flipped byte")):
                if number and (disk is None or not cases.damage(disk)):
                    break
                half = stored[number :: len("ab")]
                job = partial(cases.ask_again, name=name, all_stored=half)
                single += _do(child, name, job)
    with start("plain") as child:
        _do(child, "start without the connector", cases.begin)
        judge = Judge(facts, child, start)
        results = [
            judge.together(name, list(pairs), alone=True)
            for name, pairs in groupby(single, lambda pair: pair.case)
        ]
        return results + [
            judge.together(name, list(pairs), alone=False)
            for name, pairs in groupby(at_once, lambda pair: pair.case)
        ]


class Judge:
    """Compares pairs, also with what an engine without a connector computes.

    Args:
        facts: of the engine with the connector.
        plain: an engine without one.
        start: makes the process of a second one.
    """

    def __init__(self, facts: Facts, plain: Child, start: Start) -> None:
        self._facts, self._plain, self._start = facts, plain, start
        self._repeats: bool | None = None
        self._batches: bool | None = None

    def together(self, name: str, pairs: Sequence[Pair], *, alone: bool) -> Result:
        """Return the result of a case's pairs, which were asked `alone` or at once."""
        result = Result(name)
        for pair in pairs:
            asked = pair.asked
            result.tokens += len(asked.prompt)
            result.hit += asked.external
            result.own += asked.own
            result.preemptions += asked.preemptions
            tokens = min(asked.cached, _common(pair.stored.prompt, asked.prompt))
            compared, different = self.blocks(pair.stored.blocks, asked.blocks, tokens)
            result.compared += compared
            result.different += different
            if not different:
                self._computed(pair, result) if alone else self._answers(pairs, pair, result)
        return result

    def _computed(self, pair: Pair, result: Result) -> None:
        """Compare all blocks, and the answer, with a fresh computation in the same steps."""
        asked, stored = pair.asked, pair.stored
        if asked.cached not in (0, *stored.ends):
            return
        ends = [*(end for end in stored.ends if end <= asked.cached), *asked.ends]
        expected = self._recompute(self._plain, asked.prompt, ends)
        compared, different = self.blocks(expected.blocks, asked.blocks, len(asked.prompt))
        different += _token(expected.answer, asked.answer)
        if different and not self._is_repeated(pair):
            result.note = NOT_REPEATED
            return
        result.compared += compared
        result.different += different

    def _answers(self, pairs: Sequence[Pair], pair: Pair, result: Result) -> None:
        """Compare answers, where the engine has the same ones for prompts alone and at once."""
        if not (different := _token(pair.stored.answer, pair.asked.answer)):
            return
        if self._batches is None:
            job = partial(cases.recompute_at_once, prompts=[each.asked.prompt for each in pairs])
            answers = _do(self._plain, "at once, without the connector", job)
            self._batches = answers == [each.stored.answer for each in pairs]
        if self._batches:
            result.different += different
        else:
            result.note = NOT_REPEATED

    def _is_repeated(self, pair: Pair) -> bool:
        """Whether a fresh computation has the same bytes in two engines without the connector."""
        if self._repeats is None:
            first = self._recompute(self._plain, pair.stored.prompt, pair.stored.ends)
            self._repeats = first.blocks == pair.stored.blocks
            if not self._repeats:  # the connector, or the engines?
                with self._start("plain") as child:
                    second = self._recompute(child, pair.stored.prompt, pair.stored.ends)
                self._repeats = first.blocks == second.blocks
        return self._repeats

    def _recompute(self, child: Child, prompt: list[int], ends: list[int]) -> Asked:
        job = partial(cases.recompute, prompt=prompt, ends=ends)
        asked: Asked = _do(child, "computed without the connector", job)
        return asked

    def blocks(self, expected: Blocks, actual: Blocks, tokens: int) -> tuple[int, list[str]]:
        """Compare the blocks that the first tokens fill; return how many, and which differ."""
        sizes = self._facts.block_tokens
        both = [
            (group, place)
            for group, place in expected.keys() & actual.keys()
            if (place + 1) * sizes[group] <= tokens
        ]
        both.sort(key=lambda key: (key[1] * sizes[key[0]], key[0]))
        different = [
            self._words(key, expected[key], actual[key])
            for key in both
            if expected[key] != actual[key]
        ]
        return len(both), different

    def _words(self, key: tuple[int, int], expected: list[int], actual: list[int]) -> str:
        (group, place), size = key, self._facts.block_tokens[key[0]]
        at = next(i for i, pair in enumerate(zip(expected, actual, strict=True)) if len({*pair}) > 1)
        layer = self._facts.layers[group][at]
        return f"block {place} (from token {place * size}), group {group}, layer {layer}"


def _do(child: Child, words: str, job: Callable[..., Any]) -> Any:
    """Return a job's answer; EngineError if the engine has none."""
    answer = child.ask(words, job)
    if child.result.error is not None:
        raise EngineError(
            f"{child.result.title} that failed at {words!r}: {child.result.error}",
            "an engine that starts and answers",
            "Try the same options with `vllm serve`.",
        )
    return answer


def _common(first: list[int], second: list[int]) -> int:
    """Return how many tokens two prompts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _token(expected: list[int], actual: list[int]) -> list[str]:
    """Return where an answer differs first, in words, if it does."""
    at = _common(expected, actual)
    return [] if expected == actual else [f"token {at} of the answer"]
