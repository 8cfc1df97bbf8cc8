"""Two ranks of one engine on CPU: each restores its bytes, and a fault of one is everybody's miss.

In `make test` in standard mode. `make test-ranks` has layerwise mode too, and requests that wait
for their loads.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks_probe import FAULTS
from support.real_engine import BLOCK, CHUNK, LENGTHS, cached
from support.scripts import environment, printed, run_probe
from support.ways import each_way

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

WAYS = each_way(("standard", "layerwise"), ("always", "async"), often=[("standard", "always")])


@pytest.fixture(scope="module", params=WAYS)
def report(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("ranks")
    model = make_model(EXACT, directory)
    env = environment(VLLM_CPU_OMP_THREADS_BIND="0|1", OMP_NUM_THREADS="1")
    return printed(run_probe("ranks", model, directory / "disk", *request.param, env=env))


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_on_both_ranks(report: dict[str, Any], name: str, tier: str):
    seen = report[name][tier]
    assert seen["right"]
    assert seen["hit"] == cached(name)
    assert min(seen["restored"]) >= cached(name) // BLOCK
    assert len(seen["restored"]) == 2


def test_a_chunk_that_one_rank_lost_is_no_hit(report: dict[str, Any]):
    seen = report["loses a chunk"]
    assert seen["faulty"]["right"]
    assert seen["faulty"]["hit"] < FAULTS["loses a chunk"] * CHUNK
    assert seen["afterwards"]["right"]
    assert seen["afterwards"]["hit"] == FAULTS["loses a chunk"] * CHUNK  # stored again


def test_a_load_that_fails_on_one_rank_is_recomputed_on_both(report: dict[str, Any]):
    seen = report["fails its loads"]
    assert seen["faulty"]["right"]
    assert seen["afterwards"]["right"]
    for turn in ("faulty", "afterwards"):
        assert min(seen[turn]["restored"]) >= FAULTS["fails its loads"] * CHUNK // BLOCK
    assert seen["afterwards"]["hit"] == FAULTS["fails its loads"] * CHUNK


def test_what_a_step_computes_behind_a_load_that_fails_on_one_rank_is_not_stored(
    report: dict[str, Any],
):
    """On the other rank: each layer's sum brings it what the failed one computes from anything."""
    seen = report["computes behind"]
    chunks = FAULTS["computes behind"]
    assert seen["faulty"]["right"]
    assert seen["faulty"]["hit"] == 2 * CHUNK
    assert seen["afterwards"]["right"]
    assert seen["afterwards"]["hit"] == chunks * CHUNK
    assert min(seen["afterwards"]["restored"]) >= chunks * CHUNK // BLOCK


def test_what_one_rank_could_not_write_is_no_hit(report: dict[str, Any]):
    seen = report["has a full disk"]
    sound, full = seen["written"]
    assert sound >= FAULTS["has a full disk"]  # layerwise, a chunk is several files
    assert full == 0
    assert seen["faulty"]["right"]
    assert seen["faulty"]["hit"] == 0
