"""Ranks on LMCache's server: each restores its bytes; a fault of one is a miss.

`make test PART=ranks` has four of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from packaging.version import Version
from rich.console import Console
from support.hybrid_probe import STATES
from support.real_engine import BLOCK, CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe, threads_of_ranks
from support.server_ranks_probe import FAULTS
from support.tiny_models import LAYERS, qwen3_next, with_kv_heads

from lmcache_xpu import versions
from lmcache_xpu.cli.verify import starter
from lmcache_xpu.verify.cases import Case, begin, hit
from lmcache_xpu.verify.judge import Judge, Outcome, do

pytestmark = [pytest.mark.engine, pytest.mark.alone]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.matrix)])
def seen(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("ranks")
    ranks = request.param
    model = with_kv_heads(ranks, directory)
    env = environment(**threads_of_ranks(ranks))
    return {
        "ranks": ranks,
        **printed(run_probe("server_ranks", model, directory, ranks, env=env)),
    }


def is_exact(asked: dict[str, Any], tokens: int, ranks: int) -> bool:
    """Whether the answer was the recomputed one, and all of these tokens' bytes on all ranks."""
    blocks = tokens // BLOCK
    return asked["right"] and len(asked["restored"]) == ranks and min(asked["restored"]) >= blocks


@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_all_ranks(seen, name):
    assert seen[name]["hit"] == cached(name)
    assert is_exact(seen[name], cached(name), seen["ranks"])


@pytest.mark.parametrize("fault", ["fails its loads", "computes behind"])
def test_a_load_that_fails_on_one_rank_is_recomputed_on_all(seen, fault):
    faulty, next_time, after_that = seen[fault]
    tokens = FAULTS[fault] * CHUNK
    assert faulty["hit"] > 0
    assert all(is_exact(asked, tokens, seen["ranks"]) for asked in seen[fault])
    # Its keys are others now, and the request that computed it anew has stored it under them.
    assert (next_time["hit"], after_that["hit"]) == (tokens, tokens)


def test_what_one_rank_could_not_store_is_no_hit(seen):
    next_time, after_that = seen["fails its stores"]
    tokens = FAULTS["fails its stores"] * CHUNK
    assert next_time["hit"] == 0
    assert is_exact(next_time, tokens, seen["ranks"])
    assert is_exact(after_that, tokens, seen["ranks"])


def test_hits_of_all_ranks_come_back_when_the_server_does(seen):
    assert seen["seen"]
    turns = [*seen["killed"], *seen["started again"]]
    assert [asked["hit"] for asked in seen["killed"]] == [0, 0]
    assert all(is_exact(asked, cached("inside"), seen["ranks"]) for asked in turns)
    assert turns[-1]["hit"] == cached("inside")


@pytest.mark.timeout(400)  # two engines of two ranks
@pytest.mark.skipif(
    Version(str(versions.installed().vllm)) < Version("0.30"),
    reason="0.26's CPU engine ends with states of two ranks, also without a connector",
)
def test_states_are_exact_on_both_ranks(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Every block of each rank, as it was stored and as ranks without the connector compute it."""
    variables = environment(LMCACHE_XPU_TENSOR_PARALLEL="2", **threads_of_ranks(2))
    for name in ("PYTHONPATH", "LMCACHE_XPU_TENSOR_PARALLEL", *threads_of_ranks(2)):
        monkeypatch.setenv(name, variables[name])
    options = {**STATES, "block_size": BLOCK}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    model = str(qwen3_next(tmp_path))
    start = starter(model, None, None, words, 200, Console(quiet=True))
    asked = [
        Case("the same prompt", 3 * BLOCK + 18),
        Case("another question", 3 * BLOCK + 18, 3 * BLOCK + 6, 40),
        Case("a block in vLLM's own cache", 3 * BLOCK + 18, own=1),
    ]
    with start("connector") as child:
        facts = do(child, "start", begin)
        pairs = [do(child, case.name, partial(hit, case=case)) for case in asked]
    with start("plain") as child:
        do(child, "start", begin)
        results = Judge(facts, child, start).results(pairs)
    assert sum(map(len, facts.layers)) > 2 * LAYERS  # of both ranks; a state has two tensors
    for result in results:
        assert result.outcome is Outcome.EXACT, (result.case, result.different, result.note)
        assert result.hit >= 2 * BLOCK
        assert result.note == ""  # also what engines without the connector compute
