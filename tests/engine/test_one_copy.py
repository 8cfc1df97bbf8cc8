"""Two ranks that hold the same, on CPU: one CPU tier, from which both load, and faults of either.

The first rank keeps the chunks, and lends its memory to the second one; in both modes. `make
test-ranks` has loads that requests wait for as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.hits import check_failed, check_hit, check_lost, check_one_copy
from support.one_copy_probe import FAULTS
from support.real_engine import CHUNK, LENGTHS, cached
from support.scripts import environment_of_ranks, printed, run_probe
from support.ways import each_way

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

ONE_HEAD = dataclasses.replace(EXACT, name="one-head", kv_heads=1)


STEPS = [("standard", "always"), ("layerwise", "always")]


@pytest.fixture(
    scope="module", params=each_way(("standard", "layerwise"), ("always", "async"), often=STEPS)
)
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("copies")
    model = make_model(ONE_HEAD, directory)
    env = environment_of_ranks(2)
    return printed(run_probe("one_copy", model, directory / "disk", *request.param, env=env))


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_both_ranks(report: dict[str, Any], name: str, tier: str):
    check_hit(report[name][tier], cached(name))


def test_one_rank_has_the_memory_and_the_files(report: dict[str, Any]):
    check_one_copy(*report["memory"])
    assert report["files"][0] > 0
    assert report["files"][1] == 0


def test_a_chunk_that_the_first_rank_lost_is_no_hit(report: dict[str, Any]):
    check_lost(report["first loses a chunk"], FAULTS["first loses a chunk"])


@pytest.mark.parametrize("name", ["first fails", "second fails", "nothing is lent"])
def test_a_load_that_fails_on_either_rank_is_recomputed_on_both(report: dict[str, Any], name: str):
    check_failed(report[name], FAULTS[name])


def test_tokens_are_right_while_chunks_come_and_go(report: dict[str, Any]):
    assert report["at once"]["right"] == 30
    assert report["at once"]["hits"] > 10 * CHUNK
