"""Every answer is the one that recomputing gives, whatever was found where."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prompts import shared
from stack import Engine

pytestmark = pytest.mark.promise("1 exactness")

AT_ONCE = 4
_recomputed: dict[tuple[int, ...], tuple[int, ...]] = {}  # the same for both modes


def recomputed(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    """The answer without any cache: a salt of its own finds nothing."""
    key = tuple(prompt)
    if key not in _recomputed:
        _recomputed[key] = engine.ask(prompt, cache_salt=f"recompute {hash(key)}").token_ids
    return _recomputed[key]


@pytest.mark.timeout(3600)
def test_answers_equal_the_recomputed_ones(
    engine: Engine, mode: str, request: pytest.FixtureRequest, figure: Callable[[str, object], None]
):
    """Four at a time over shared prefixes, with all tiers evicting.

    The recomputed answer comes one at a time, so that a difference by batching would show as well:
    the model is float32, and its engine repeats itself whatever else is in the batch.

    Must fail: with one block's slot off by one in `Stager.load`, with loads that leave out the
    values, and with the stores of a step whose load failed (see test_3_faults).
    """
    count = request.config.getoption("--requests")
    prompts = list(shared(seed=1, count=count))
    before = engine.counts()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda prompt: engine.ask(prompt).token_ids, prompts))
        spent = engine.counts() - before
        expected = list(threads.map(lambda prompt: recomputed(engine, prompt), prompts))
    different = [i for i in range(count) if answers[i] != expected[i]]
    metrics = engine.metrics()
    figure("requests", count)
    figure("different", len(different))
    figure("tokens", spent.prompt)
    figure("engine hits", spent.prefix_hits)
    figure("LMCache hits", spent.external_hits)
    figure("from disk", int(metrics.flow("tokens", "load", "disk")))
    assert not different
    assert spent.external_hits > 0
    assert metrics.flow("tokens", "load", "disk") > 0
    assert metrics.flow("tokens", "store", "disk") > 64 * 256  # more than the disk tier holds
