"""Compare what a connector gave back with what was computed, and say where they differ first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
NOT_REPEATED = "only what was loaded is compared: two engines compute other bytes here, without it"

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
    failed: int = 0  # tokens that were promised, and computed after a load that failed
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

    With `restart` a second engine is asked for what the first one stored. `disk` is a directory
    that holds all of it; a byte of each file is flipped. Raises EngineError if an engine does
    not start, or gives no answer.
    """
    stored: list[Asked] = []
    with start("connector") as child:
        facts: Facts = do(child, "start", cases.begin)
        pairs = all_cases(child, facts)
        if restart:
            stored = do(child, "store", partial(cases.store, count=RESTARTED))
    if stored:
        with start("connector") as child:
            do(child, "start again", cases.begin)
            for number, name in enumerate(("after a restart", "from files with a flipped byte")):
                if number and (disk is None or not cases.damage(disk)):
                    break
                job = partial(cases.ask_again, name=name, all_stored=stored[number::2])
                pairs += do(child, name, job)
    with start("plain") as child:
        do(child, "start without the connector", cases.begin)
        return Judge(facts, child, start).results(pairs)


def all_cases(child: Child, facts: Facts) -> list[Pair]:
    """Ask an engine with the connector all that one engine can be asked."""
    one_by_one = [partial(cases.hit, case=case) for case in cases.cases(facts)]
    pairs: list[Pair] = [do(child, job.keywords["case"].name, job) for job in one_by_one]
    return pairs + list(do(child, "many at once", cases.crowd))


def acquit(start: Start) -> list[Result]:
    """Ask the same prompts without any cache, with vLLM's own, and with the connector.

    All of them are asked twice, in the same steps. Returns what differs from the answers and blocks
    that are computed without any cache. Parameters and errors as those of `verify`.
    """
    with start("bare") as child:
        facts: Facts = do(child, "start without any cache", cases.begin)
        prompts: list[list[int]] = do(child, "prompts", cases.prompts)
        computed: list[Pair] = do(child, "asked twice", partial(cases.twice, prompts=prompts))
    results = [_against("no cache", facts, computed, computed)]
    for kind, case in (("plain", "vLLM's own cache"), ("connector", "the connector")):
        with start(kind) as child:
            others: Facts = do(child, f"start with {case}", cases.begin)
            job = partial(cases.twice, prompts=prompts, kept=kind == "plain")
            results.append(_against(case, facts, computed, do(child, "asked twice", job)))
        if others.block_tokens != facts.block_tokens:
            results[-1].note = "its blocks have another size: answers alone are compared"
    return results


def _against(case: str, facts: Facts, computed: list[Pair], pairs: list[Pair]) -> Result:
    result = Result(case)
    for expected, pair in zip((each.stored for each in computed), pairs, strict=True):
        asked = pair.asked
        result.tokens += len(asked.prompt)
        result.own += asked.own
        result.hit += asked.external
        compared, different = differences(facts, expected.blocks, asked.blocks)
        result.compared += compared
        result.different += _token(expected.answer, asked.answer) + different
        if len({*asked.answer}) == 1:
            result.note = "an answer is one token, again and again"
    return result


class Judge:
    """Compares pairs, also with what engines without a connector compute: `plain`, or a new one."""

    def __init__(self, facts: Facts, plain: Child, start: Start) -> None:
        self._facts, self._plain, self._start = facts, plain, start
        self._repeats: bool | None = None

    def results(self, pairs: Iterable[Pair]) -> list[Result]:
        """Return the results of all cases."""
        return [self.result(name, each) for name, each in groupby(pairs, lambda pair: pair.case)]

    def result(self, name: str, pairs: Iterable[Pair]) -> Result:
        """Return the result of a case's pairs."""
        result = Result(name)
        for pair in pairs:
            asked = pair.asked
            result.tokens += len(asked.prompt)
            result.own += asked.own
            result.preemptions += asked.preemptions
            if asked.failed:
                result.failed += asked.external
                continue
            result.hit += asked.external
            tokens = min(_kept(asked), _common(pair.stored.prompt, asked.prompt))
            compared, different = differences(
                self._facts, pair.stored.blocks, asked.blocks, tokens, *pair.recomputed
            )
            result.compared += compared
            result.different += different
            if pair.alone and not different and asked.cached in (0, *pair.stored.ends):
                self._computed(pair, result)
        return result

    def _computed(self, pair: Pair, result: Result) -> None:
        """Compare all blocks, and the answer, with a fresh computation in the same steps."""
        asked, stored = pair.asked, pair.stored
        ends = [*(end for end in stored.ends if end <= asked.cached), *asked.ends]
        expected = self._recompute(self._plain, asked.prompt, ends)
        tokens = _kept(asked) if _kept(asked) < asked.cached else None
        compared, different = differences(self._facts, expected.blocks, asked.blocks, tokens)
        different += _token(expected.answer, asked.answer)
        if different and not self._is_repeated(pair):
            result.note = NOT_REPEATED
            return
        result.compared += compared
        result.different += different

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
        job = partial(cases.alone, prompt=prompt, ends=ends)
        asked: Asked = do(child, "computed without the connector", job)
        return asked


def differences(
    facts: Facts, expected: Blocks, actual: Blocks, tokens: int | None = None, *others: Blocks
) -> tuple[int, list[str]]:
    """Compare blocks, or those that the first tokens fill; return how many, and which differ.

    What a rank has of a block may also be all that it has of the same block in one of the `others`.
    """
    sizes = facts.block_tokens
    both = sorted(
        (place * sizes[group], group, place)
        for group, place in expected.keys() & actual.keys()
        if tokens is None or (place + 1) * sizes[group] <= tokens
    )
    different = []
    for token, group, place in both:
        key, layers = (group, place), facts.layers[group]
        allowed = [expected[key], *(blocks[key] for blocks in others if key in blocks)]
        length = len(layers) // facts.ranks or 1
        for rank in (slice(at, at + length) for at in range(0, len(layers), length)):
            if actual[key][rank] not in [row[rank] for row in allowed]:
                columns = zip(layers[rank], expected[key][rank], actual[key][rank], strict=True)
                layer = next(layer for layer, before, after in columns if before != after)
                different.append(f"block {place} (token {token}), group {group}, layer {layer}")
                break
    return len(both), different


def do(child: Child, words: str, job: Callable[..., Any]) -> Any:
    """Return a job's answer; EngineError if the engine has none."""
    answer = child.ask(words, job)
    if child.result.error is not None:
        raise EngineError(
            f"{child.result.title} that failed at {words!r}: {child.result.error}",
            "an engine that starts and answers",
            "Try the same options with `vllm serve`.",
        )
    return answer


def _kept(asked: Asked) -> int:
    """Return the cached tokens that stay: of a whole hit the last one is computed anew, alone."""
    return min(asked.cached, len(asked.prompt) - 1)


def _common(first: list[int], second: list[int]) -> int:
    """Return how many tokens two prompts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _token(expected: list[int], actual: list[int]) -> list[str]:
    """Return where an answer differs first, in words, if it does."""
    at = _common(expected, actual)
    return [] if expected == actual else [f"token {at} of the answer"]
