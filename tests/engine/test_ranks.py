"""Ranks of one engine on CPU: each restores its bytes, and a fault of one is everybody's miss.

In `make test` two ranks in standard mode. `make test-ranks` has layerwise mode too, requests that
wait for their loads, and four ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.hits import check_failed, check_hit, check_lost, check_restored
from support.ranks_probe import FAULTS, SLOW_S
from support.real_engine import CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe, threads_of_ranks
from support.tiny_models import with_kv_heads
from support.ways import each_way

pytestmark = pytest.mark.engine

WAYS = each_way(
    ("standard", "layerwise"), ("always", "async"), ("2", "4"), often=[("standard", "always", "2")]
)
FROM_MEMORY = len(LENGTHS)  # loads whose requests need not wait for a disk


@pytest.fixture(scope="module", params=WAYS)
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("ranks")
    _, loads, number = request.param
    ranks = int(number)
    model = with_kv_heads(ranks, directory)
    env = environment(**threads_of_ranks(ranks))
    done = run_probe("ranks", model, directory / "disk", *request.param, env=env)
    inside = FROM_MEMORY if loads == "always" else 0
    return {"ranks": ranks, "in steps": inside, **printed(done)}


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_all_ranks(report: dict[str, Any], name: str, tier: str):
    check_hit(report[name][tier], cached(name), report["ranks"])


def test_loads_begin_on_all_ranks_with_their_step(report: dict[str, Any]):
    assert report["loads"] == [report["in steps"]] * report["ranks"]


def test_a_chunk_that_one_rank_lost_is_no_hit(report: dict[str, Any]):
    check_lost(report["loses a chunk"], FAULTS["loses a chunk"])


def test_a_load_that_fails_on_one_rank_is_recomputed_on_all(report: dict[str, Any]):
    check_failed(report["fails its loads"], FAULTS["fails its loads"], report["ranks"])


def test_what_a_step_computes_behind_a_load_that_fails_on_one_rank_is_not_stored(
    report: dict[str, Any],
):
    """On the other rank: each layer's sum brings it what the failed one computes from anything."""
    faulty, afterwards = report["computes behind"]
    assert faulty["right"]
    assert faulty["hit"] == 2 * CHUNK
    check_hit(afterwards, FAULTS["computes behind"] * CHUNK, report["ranks"])


def test_one_rank_with_a_slow_disk_lets_its_request_wait_and_costs_no_token(report: dict[str, Any]):
    seen, tokens = report["has a slow disk"], FAULTS["has a slow disk"] * CHUNK
    check_hit(seen["faulty"], tokens, report["ranks"])
    assert seen["faulty"]["seconds"] >= SLOW_S
    assert seen["beside"] == {"right": True, "first": 1}  # whoever loads nothing waits for no disk
    check_hit(seen["afterwards"], tokens, report["ranks"])


def test_what_one_rank_could_not_write_is_no_hit(report: dict[str, Any]):
    seen, chunks = report["has a full disk"], FAULTS["has a full disk"]
    sound, full, *others = seen["written"]
    assert min([sound, *others]) >= chunks  # layerwise, a chunk is several files
    assert full == 0
    check_restored(seen["faulty"], chunks * CHUNK, report["ranks"])
    assert seen["faulty"]["hit"] == 0
    check_hit(seen["afterwards"], chunks * CHUNK, report["ranks"])  # of the CPU tier
