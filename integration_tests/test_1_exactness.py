"""Every answer is the one that recomputing gives, whatever was found where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine import Engine
from prompts import shared

pytestmark = pytest.mark.promise("1 exactness")

AT_ONCE = 4
AGAIN = 3
# How far apart two log probabilities may be that float32 rounds into another order. Of prompt 2032
# below they are -1.4e-6 to 1.6e-5 apart, in vLLM alone and with whatever else is in the batch: the
# other token came in 5 of 326 answers. Of 536 other tokens the closest were 6e-4.
TIE = 5e-5
_recomputed: dict[tuple[int, ...], tuple[int, ...]] = {}  # the same for both modes


def recomputed(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    key = tuple(prompt)
    if key not in _recomputed:
        _recomputed[key] = engine.recompute(prompt).token_ids
    return _recomputed[key]


def repeats_itself(engine: Engine, prompt: list[int], threads: ThreadPoolExecutor) -> bool:
    """Whether recomputing gives the same answer beside whatever else is computed."""
    again = threads.map(lambda number: engine.recompute(prompt, again=number), range(1, AGAIN + 1))
    return {answer.token_ids for answer in again} == {_recomputed[tuple(prompt)]}


def is_tie(engine: Engine, prompt: list[int], answer: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two answers part where the model prefers neither token."""
    at = next(at for at, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b)
    likeliest = engine.likeliest([*prompt, *answer[:at]])
    return abs(likeliest.get(answer[at], -math.inf) - likeliest.get(other[at], math.inf)) < TIE


def check_ties(engine: Engine) -> None:
    """What counts as a tie, by the one that is known."""
    prompt = list(shared(seed=1, count=2033))[2032]
    answer = [1702, 3479, 3013, 269, 1095, 724, 1137]
    assert engine.recompute(prompt, 6).token_ids == tuple(answer[:6])
    assert is_tie(engine, prompt, answer, [*answer[:6], 1954])
    assert not is_tie(engine, prompt, answer, [3323, *answer[1:]])  # 0.009 less likely
    assert not is_tie(engine, prompt, answer, [*answer[:6], 299])


@pytest.mark.fails_without("blocks")
@pytest.mark.timeout(7200)
def test_answers_equal_the_recomputed_ones(
    engine: Engine, mode: str, request: pytest.FixtureRequest, figure: Callable[[str, object], None]
):
    """Four at a time over shared prefixes, with all tiers evicting.

    The model of these tests is float32, and its engine repeats itself whatever else is in the
    batch, but for ties, which are said. An engine given by --url may not: there a prompt counts
    only where recomputing it several times gives one answer, and the others are said.

    Seen to fail with loads that leave out one block of each.
    """
    count = request.config.getoption("--requests")
    prompts = list(shared(seed=1, count=count))
    before, from_disk = engine.counts(), engine.metrics().flow("tokens", "load", "disk")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda prompt: engine.ask(prompt).token_ids, prompts))
        spent = engine.counts() - before
        expected = list(threads.map(lambda prompt: recomputed(engine, prompt), prompts))
        different = [i for i in range(count) if answers[i] != expected[i]]
        if engine.small:
            check_ties(engine)
            wrong = [
                i for i in different if not is_tie(engine, prompts[i], expected[i], answers[i])
            ]
            ties = len(different) - len(wrong)
            figure("ties", ties)
            assert ties <= 1 + count // 1000, "more than chance gives"
            different = wrong
        else:
            wrong = [i for i in different if repeats_itself(engine, prompts[i], threads)]
            figure("not repeatable", len(different) - len(wrong))
            different = wrong
    metrics = engine.metrics()
    figure("requests", count)
    figure("different", len(different))
    figure("tokens", spent.prompt)
    figure("engine hits", spent.prefix_hits)
    figure("LMCache hits", spent.external_hits)
    figure("from disk", int(metrics.flow("tokens", "load", "disk") - from_disk))
    assert not different
    if engine.small:
        assert spent.external_hits > 0
        assert metrics.flow("tokens", "load", "disk") > from_disk
        if count >= 40:
            stored = metrics.flow("tokens", "store", "disk")
            assert stored > 64 * 256, "less than the disk tier holds: nothing was evicted"
