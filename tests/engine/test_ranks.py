"""Ranks of LMCache's own engine on CPU, layer by layer: each restores its bytes, or all miss.

By default the ranks of an engine share a server: see test_server_ranks.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.hits import check_failed, check_hit, check_lost, check_restored
from support.ranks_probe import FAULTS
from support.real_engine import CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe, threads_of_ranks
from support.tiny_models import with_kv_heads

pytestmark = [pytest.mark.engine, pytest.mark.matrix]


@pytest.fixture(scope="module", params=[2, 4])
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory, ranks = tmp_path_factory.mktemp("ranks"), request.param
    model = with_kv_heads(ranks, directory)
    env = environment(**threads_of_ranks(ranks))
    done = run_probe("ranks", model, directory / "disk", ranks, env=env)
    return {"ranks": ranks, **printed(done)}


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_all_ranks(report: dict[str, Any], name: str, tier: str):
    check_hit(report[name][tier], cached(name), report["ranks"])


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


def test_what_one_rank_could_not_write_is_no_hit(report: dict[str, Any]):
    seen, chunks = report["has a full disk"], FAULTS["has a full disk"]
    sound, full, *others = seen["written"]
    assert min([sound, *others]) >= chunks  # layerwise, a chunk is several files
    assert full == 0
    check_restored(seen["faulty"], chunks * CHUNK, report["ranks"])
    assert seen["faulty"]["hit"] == 0
    check_hit(seen["afterwards"], chunks * CHUNK, report["ranks"])  # of the CPU tier
